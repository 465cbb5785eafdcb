"""A report as text in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recd_plugin_recd.analyze.report import FeatureReport, Report
from recd_plugin_recd.analyze.words import (
    bytes_in_words,
    factor,
    findings,
    session_rows,
    share,
    storage_rows,
)


def show(console: Console, report: Report) -> None:
    """Print the report."""
    console.print(f"[bold]{escape(report.path)}[/]", soft_wrap=True)
    for finding in findings(report):
        console.print(f"- {escape(finding)}", highlight=False)
    for table in (_sessions(report), _features(report), _storage(report)):
        console.print()
        console.print(table)
    later = "" if report.clustered else ", once the table is by session"
    console.print(f"[bold]for registry.yaml{later}[/]\n")
    console.print(report.converter, markup=False, highlight=False, soft_wrap=True, end="")


def _sessions(report: Report) -> Table:
    table = _table("sessions by their samples", "samples", "in a partition", "in a batch")
    for label, partition, batch in session_rows(report):
        table.add_row(label, share(partition), share(batch))
    return table


def _features(report: Report) -> Table:
    headings = ["ids a\nrow", "\nd", "exact\n%", "partial\n%", "predicted\nas is", "found\nas is"]
    if not report.clustered:
        headings += ["predicted\nby session", "found\nby session"]
    table = _table(
        "features and their DedupeFactors", "\nfeature", *headings, "\npartial", "\npays"
    )
    for each in report.features:
        table.add_row(*_cells(each, report.clustered))
    return table


def _cells(feature: FeatureReport, clustered: bool) -> list[str]:
    by_session = [factor(feature.predicted_by_session), factor(feature.measured_by_session)]
    return [
        escape(feature.name),
        f"{feature.length:.1f}",
        f"{feature.stays:.2f}",
        f"{100 * feature.exact:.1f}",
        f"{100 * feature.partial:.1f}",
        factor(feature.predicted_as_is),
        factor(feature.measured_as_is),
        *([] if clustered else by_session),
        factor(feature.partial_factor),
        feature.form,
    ]


def _storage(report: Report) -> Table:
    table = _table("storage of the features", "", "bytes a row", "table")
    for what, size in storage_rows(report.storage):
        table.add_row(what, f"{size:,.0f}", bytes_in_words(size * report.rows))
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right")
    return table

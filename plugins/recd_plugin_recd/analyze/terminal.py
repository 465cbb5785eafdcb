"""A report as text in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recd_plugin_recd.analyze.report import (
    FeatureReport,
    TableAnalysis,
    factor,
    findings,
    session_table,
    storage_table,
)


def show(console: Console, report: TableAnalysis) -> None:
    """Print the report."""
    console.print(f"[bold]{escape(report.path)}[/]", soft_wrap=True)
    for finding in findings(report):
        console.print(f"- {escape(finding)}", highlight=False)
    for table in (
        _plain("sessions by their samples", *session_table(report)),
        _features(report),
        _plain("storage of the features", *storage_table(report)),
    ):
        console.print()
        console.print(table)
    if report.converter is None:
        return
    later = "" if report.clustered else ", once the table is by session"
    console.print(f"[bold]for registry.yaml{later}[/]\n")
    console.print(report.converter, markup=False, highlight=False, soft_wrap=True, end="")


def _features(report: TableAnalysis) -> Table:
    rows = [_cells(each, report.clustered) for each in report.features]
    table = _table("features and their DedupeFactors", *rows[0])
    table.padding = (0, 0, 0, 0)
    for row in rows:
        table.add_row(*row.values())
    return table


def _cells(feature: FeatureReport, clustered: bool) -> dict[str, str]:
    """By heading. Narrow ones leave room for names of 15 characters where a line has 80."""
    if clustered:
        factors = {
            "\n\npredicted": feature.predicted_as_is,
            "\n\nfound": feature.measured_as_is,
        }
    else:
        factors = {
            "\nas it\nis": feature.measured_as_is,
            "by\nsession,\npredicted": feature.predicted_by_session,
            "by\nsession,\nfound": feature.measured_by_session,
        }
    return {
        "\n\nfeature": escape(feature.name),
        "\nids a\nrow": f"{feature.length:.1f}",
        "\n\nd": f"{feature.stays:.2f}",
        "\nexact\n%": f"{100 * feature.exact:.1f}",
        "\npartial\n%": f"{100 * feature.partial:.1f}",
        **{heading: factor(value) for heading, value in factors.items()},
        "\n\npartial": factor(feature.partial_factor),
        "\n\npays": feature.form or "-",
    }


def _plain(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = _table(title, *headings)
    for row in rows:
        table.add_row(*row)
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
        table.add_column(heading, justify="right", no_wrap=True)
    return table

"""Prints the report of ``recd analyze``, or renders it as an HTML page."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recd_plugin_recd.analyze.study import MIN_FACTOR, MIN_SESSIONS, TableAnalysis

_HEADINGS = (
    "feature", "ids\nper row", "list\nstays", "exact\n%", "partial\n%", "factor\nnow",
    "factor\nsorted", "factor\npartial", "use",
)  # fmt: skip


def show(console: Console, report: TableAnalysis) -> None:
    """Print the report: findings, a table of features, and a section for registry.yaml."""
    console.print(f"[bold]{escape(report.path)}[/]", soft_wrap=True)
    for finding in findings(report):
        console.print(f"- {escape(finding)}", highlight=False)
    table = Table(
        title="Features, with DedupeFactors (ids / ids in unique rows)",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.title_style, table.title_justify = "bold", "left"
    table.add_column(_HEADINGS[0], overflow="fold")
    for heading in _HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in report.features:
        factors = each.factor_as_is, each.factor_by_session, each.partial_factor
        table.add_row(
            escape(each.name),
            f"{each.length:.1f}",
            f"{each.stays:.2f}",
            f"{100 * each.exact:.1f}",
            f"{100 * each.partial:.1f}",
            *map(_factor, factors),
            each.form or "-",
        )
    console.print()
    console.print(table)
    if report.converter is not None:
        once = "" if report.sample is None else ", for the table after recd cluster"
        console.print(f"[bold]Replace `converter:` of your registry file{once} by[/]\n")
        console.print(report.converter, markup=False, highlight=False, soft_wrap=True, end="")


def page(report: TableAnalysis) -> str:
    """Return the report as an HTML page."""
    console = Console(record=True, file=io.StringIO(), width=120)
    show(console, report)
    return console.export_html()


def findings(report: TableAnalysis) -> Iterator[str]:
    """Yield the main findings, each as a text of one to three sentences."""
    sessions, sample = report.sessions, report.sample
    inside = "" if report.partitions == 1 else f" in {report.partitions:,} partitions"
    yield (
        f"{report.rows:,} rows{inside} of {sessions.count:,} sessions: "
        f"{sessions.samples_per_session:.2f} rows per session (median {sessions.median}, maximum "
        f"{sessions.longest:,}). A batch of {report.batch_size:,} rows has "
        f"{report.samples_per_batch_session:.2f} rows per session."
    )
    if sample is None:
        is_registry = report.path.endswith((".yaml", ".yml"))
        what = "training data that the dataset of this file reads" if is_registry else "table"
        yield f"The {what} is clustered: the rows of each session are adjacent."
    else:
        yield (
            f"The table is not clustered: {_share(sessions.torn)} of its sessions have rows that "
            f"are not adjacent. DedupeFactors after sorting by session are measured on a sample of "
            f"{sample.rows:,} rows of {sample.sessions:,} sessions."
        )
    yield (
        f"{_share(report.exact)} of the ids are in lists that equal the list of the previous row "
        f"of the session (exact). {_share(report.partial)} of the ids also occur in the list of "
        "the previous row (partial)."
    )
    by_session = "" if sample is None else f", {_factor(report.factor_by_session)} after sorting"
    yield (
        f"DedupeFactor over all features: {_factor(report.factor_as_is)} in the current row order"
        f"{by_session}, {_factor(report.partial_factor)} with partial deduplication."
    )
    forms = [each.form for each in report.features]
    if report.converter is None and sample is not None:
        yield (
            f"The sample is too small for a recommendation: {sample.sessions:,} sessions fit into "
            f"--sample-mb {sample.megabytes}, but {MIN_SESSIONS} are needed. Raise --sample-mb."
        )
    elif all(form == "plain" for form in forms):
        yield (
            "No feature repeats enough for deduplication to pay off: all DedupeFactors are below "
            f"{MIN_FACTOR}."
        )
    else:
        first = "" if sample is None else "Cluster the table first (recd cluster). "
        yield (
            f"{first}Of the {len(forms)} features, deduplicate {forms.count('exact')} exactly and "
            f"{forms.count('partial')} partially, and keep {forms.count('plain')} plain."
        )


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _factor(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "inf"

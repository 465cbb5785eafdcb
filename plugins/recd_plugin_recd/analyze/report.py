"""Formats the report of ``recd analyze`` for the terminal and as a self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recd_plugin_recd.analyze.study import MIN_FACTOR, MIN_SESSIONS, FeatureReport, TableAnalysis
from recd_plugins.api import html_page, plots, text_utils

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = Sequence[Sequence[str]]

#: Maximum number of features that stay legible in a plot.
MAX_FEATURES = 48
_BLUE, _ORANGE, *_ = plots.COLORS


def show(console: Console, report: TableAnalysis) -> None:
    """Print the report to the terminal."""
    console.print(f"[bold]{escape(report.path)}[/]", soft_wrap=True)
    for finding in findings(report):
        console.print(f"- {escape(finding)}", highlight=False)
    for title, headings, rows in _tables(report):
        table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
        table.padding = (0, 0)
        table.add_column(headings[0], overflow="fold")
        for heading in headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(escape(row[0]), *row[1:])
        console.print()
        console.print(table)
    if report.converter is not None:
        console.print(f"[bold]{_for_registry(report)}[/]\n")
        console.print(report.converter, markup=False, highlight=False, soft_wrap=True, end="")


def page(report: TableAnalysis) -> str:
    """Return the report as an HTML page with an SVG plot."""
    title = f"recd analyze {report.path}"
    parts: list[html_page.Html] = [
        html_page.element("h1", title),
        html_page.element(
            "ul", *(html_page.element("li", finding) for finding in findings(report))
        ),
        *html_page.html_section("Duplication (figure 4)", _shown(report), duplication_plot(report)),
    ]
    for heading, headings, rows in _tables(report):
        parts.append(html_page.element("h2", heading))
        parts.append(html_page.html_table([each.replace("\n", " ") for each in headings], rows))
    if report.converter is not None:
        parts += [
            html_page.element("h2", _for_registry(report)),
            html_page.element("pre", report.converter),
        ]
    return html_page.html_page(title, parts)


def _shown(report: TableAnalysis) -> str:
    many = len(report.features) > MAX_FEATURES
    return f"The {MAX_FEATURES} features with the most ids." if many else ""


def _for_registry(report: TableAnalysis) -> str:
    return "for registry.yaml" + ("" if report.clustered else ", once the table is by session")


def findings(report: TableAnalysis) -> Iterator[str]:
    """Yield the main findings, each in one or two sentences."""
    sessions, sample = report.sessions, report.sample
    inside = "" if report.partitions == 1 else f" in {report.partitions:,} partitions"
    yield (
        f"{report.rows:,} rows{inside} of {sessions.count:,} sessions: "
        f"{sessions.samples_per_session:.2f} samples a session, median {sessions.median}, longest "
        f"{sessions.longest:,}. A batch of {report.batch_size:,} has "
        f"{report.batches.samples_per_session:.2f} samples a session."
    )
    if report.clustered:
        yield "The table is clustered: the rows of each session lie together."
    else:
        yield (
            f"The table is not clustered: {_share(sessions.torn)} of its sessions are torn apart. "
            f"What it would be by session was measured on {sample.rows:,} rows of "
            f"{sample.sessions:,} sessions."
        )
    yield (
        f"{_share(report.exact)} of the ids stand in rows that equal the row before in their "
        f"session (exact), {_share(report.partial)} stand in the row before too (partial)."
    )
    by_session = "" if report.clustered else f", by session {_factor(report.factor_by_session)}"
    yield (
        f"DedupeFactor over all features: {_factor(report.factor_as_is)} as it is{by_session}; "
        f"with partial deduplication {_factor(report.partial_factor)}."
    )
    forms = [each.form for each in report.features]
    if sample.too_small:
        yield (
            f"The sample is too small to tell what pays: {sample.sessions:,} sessions fit into "
            f"--sample-mb {sample.megabytes}, and advice takes {MIN_SESSIONS}. Raise --sample-mb."
        )
    elif all(form == "plain" for form in forms):
        yield f"No feature repeats enough to be worth deduplicating (DedupeFactor {MIN_FACTOR})."
    else:
        first = "" if report.clustered else "Cluster the table first (recd cluster). "
        yield (
            f"{first}Of {len(forms)} features deduplicate {forms.count('exact')} exactly and "
            f"{forms.count('partial')} partially; {forms.count('plain')} stay plain."
        )


def _tables(report: TableAnalysis) -> Iterator[tuple[str, Sequence[str], Cells]]:
    """Yield the title, headings and rows of each table. Columns are narrow to fit 80 characters."""
    sizes = [[size, _share(part), _share(batch)] for size, part, batch in _session_shares(report)]
    yield "sessions by their samples", ("samples", "in a partition", "in a batch"), sizes
    headings = (
        "feature", "ids\na row", "d", "exact\n%", "partial\n%", "as it\nis",
        "by\nsession,\npredicted", "by\nsession", "partial", "pays",
    )  # fmt: skip
    rows = [
        (
            each.name,
            f"{each.length:.1f}",
            f"{each.stays:.2f}",
            f"{100 * each.exact:.1f}",
            f"{100 * each.partial:.1f}",
            _factor(each.measured_as_is),
            _factor(each.predicted_by_session),
            _factor(each.measured_by_session),
            _factor(each.partial_factor),
            each.form or "-",
        )
        for each in report.features
    ]
    yield "features and their DedupeFactors", headings, rows
    storage = {
        "files as they are": report.storage.stored,
        "by session, list": report.storage.by_session,
        "by session, list_dict": report.storage.by_session_dict,
    }
    bytes_rows = [
        (what, f"{size:,.0f}", text_utils.bytes_text(size * report.rows))
        for what, size in storage.items()
        if size is not None
    ]
    yield "storage of the features", ("", "bytes a row", "table"), bytes_rows


def _session_shares(report: TableAnalysis) -> Iterator[tuple[str, float, float]]:
    """Yield each session size with the share of such sessions in partitions and in batches."""
    partition, batch = report.sessions.histogram, report.batches.histogram
    all_partition, all_batch = sum(partition.values()), sum(batch.values())
    for size in sorted(partition.keys() | batch.keys()):
        label = str(size) if size <= 2 else f"{size // 2 + 1} to {size}"
        yield label, partition.get(size, 0) / all_partition, batch.get(size, 0) / all_batch


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _factor(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "inf"


@plots.plot_style()
def duplication_plot(report: TableAnalysis) -> html_page.Html:
    """Plot exact and partial duplication of each feature (figure 4)."""
    features = shown_features(report)
    axes = _feature_axes(features, "% of ids")
    at = range(len(features))
    axes.barh(at, [100 * each.partial for each in features], color=_ORANGE, label="partial")
    axes.barh(at, [100 * each.exact for each in features], color=_BLUE, label="exact")
    axes.set_xlim(0, 100)
    return _svg(axes)


def shown_features(report: TableAnalysis) -> list[FeatureReport]:
    """Return the features with the most ids that fit into a plot, in table order."""
    largest = sorted(report.features, key=lambda each: -each.length)[:MAX_FEATURES]
    return [each for each in report.features if each in largest]


def _feature_axes(features: Sequence[FeatureReport], label: str) -> Axes:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 1.2 + 0.2 * len(features)), layout="constrained").subplots()
    axes.set_yticks(range(len(features)), [each.name for each in features])
    axes.set_ylim(len(features) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.grid(visible=False, axis="y")
    return axes


def _svg(axes: Axes) -> html_page.Html:
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    figure = axes.get_figure(root=True)
    assert figure is not None
    return plots.svg_of(figure)

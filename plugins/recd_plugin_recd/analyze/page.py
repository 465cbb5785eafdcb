"""A report as one page of HTML that needs nothing else, with plots as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugin_recd.analyze.report import (
    FeatureReport,
    TableAnalysis,
    factor,
    findings,
    session_rows,
    session_table,
    share,
    storage_rows,
    storage_table,
)
from recd_plugins.api import (
    COLORS,
    Html,
    element,
    html_page,
    html_section,
    html_table,
    plot_style,
    svg_of,
)

_GLOSSARY = (
    ("exact", "ids in rows that equal the row before in their session, as a share of all ids"),
    ("partial", "ids that the row before in the session has too, wherever they stand"),
    ("d", "how often the next row of a session has the same list"),
    (
        "DedupeFactor",
        "ids over ids that are left when equal rows of a batch are stored once; worth it from "
        "about 1.5",
    ),
    (
        "predicted",
        "1 / (1 - (S - 1) / S * d), with S the samples of a session: in a batch as the table is, "
        "in a partition by session. It knows of no rows that repeat in other sessions",
    ),
    ("partial factor", "the same where a row that moved on by a few ids stores only the new ones"),
)


def page(report: TableAnalysis) -> str:
    """The page, with plots as SVG and tables."""
    title = f"recd analyze {report.path}"
    parts = [
        element("h1", title),
        element("ul", *(element("li", finding) for finding in findings(report))),
        *html_section(
            "Samples of a session",
            "Rows of a session repeat one another. Those that fall into one batch can be "
            "deduplicated there; those that lie together in a partition can be brought into one.",
            session_plot(report),
        ),
        html_table(*session_table(report)),
        *html_section(
            "Duplication",
            "What each feature repeats of the row before in its session." + _shown(report),
            duplication_plot(report),
        ),
        *html_section(
            "DedupeFactors",
            "How many times fewer ids a batch holds when each list is stored once.",
            factor_plot(report),
        ),
        _features(report),
        _glossary(),
        *html_section(
            "Storage",
            "What the features take in Parquet. Of the files it is known, the rest was written to "
            "a scratch file to learn it, with the settings of recd cluster.",
            storage_plot(report),
        ),
        html_table(*storage_table(report)),
        *_advice(report),
    ]
    return html_page(title, parts)


def _shown(report: TableAnalysis) -> str:
    more = len(report.features) > MAX_FEATURES
    return f" The plots show the {MAX_FEATURES} features with the most ids." if more else ""


def _features(report: TableAnalysis) -> Html:
    headings = (
        "feature", "ids a row", "d", "exact", "partial", "predicted as is", "found as is",
        "predicted by session", "found by session", "partial factor", "pays",
    )  # fmt: skip
    rows = [
        (
            each.name,
            f"{each.length:.1f}",
            f"{each.stays:.3f}",
            share(each.exact),
            share(each.partial),
            factor(each.predicted_as_is),
            factor(each.measured_as_is),
            factor(each.predicted_by_session),
            factor(each.measured_by_session),
            factor(each.partial_factor),
            each.form or "-",
        )
        for each in report.features
    ]
    return html_table(headings, rows)


def _glossary() -> Html:
    terms: list[str] = []
    for term, meaning in _GLOSSARY:
        terms += [element("b", term), f": {meaning}", "; "]
    return element("p", *terms[:-1], ".", css="note")


def _advice(report: TableAnalysis) -> Iterable[Html]:
    if report.converter is None:
        return
    later = "" if report.clustered else ", once the table is clustered by session"
    rows = [
        (", ".join(group.features), str(len(group.features)), factor(group.dedupe_factor))
        for group in report.groups
    ]
    yield element("h2", f"For registry.yaml{later}")
    yield element("pre", report.converter)
    if rows:
        yield element("p", "Features that change together, and their DedupeFactor as one group:")
        yield html_table(("features", "number", "DedupeFactor"), rows)


#: Features that a plot can show legibly: those with the most ids.
MAX_FEATURES = 48
_BLUE, _ORANGE, _GREEN, _, _GREY = COLORS


@plot_style()
def session_plot(report: TableAnalysis) -> Html:
    """Shares of sessions by their samples, in a partition and in a batch (figure 3)."""
    rows = list(session_rows(report))
    axes = _axes(8, 3)
    for shift, column, color, label in (
        (-0.2, 1, _BLUE, "in a partition"),
        (0.2, 2, _ORANGE, f"in a batch of {report.batch_size:,}"),
    ):
        at = [index + shift for index in range(len(rows))]
        axes.bar(at, [100 * float(row[column]) for row in rows], 0.4, color=color, label=label)
    axes.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=30, ha="right")
    axes.set_xlabel("samples")
    axes.set_ylabel("% of sessions")
    axes.grid(visible=False, axis="x")
    axes.legend(frameon=False)
    return _svg(axes)


@plot_style()
def duplication_plot(report: TableAnalysis) -> Html:
    """Exact and partial duplication of each feature (figure 4)."""
    features = shown_features(report)
    axes = _feature_axes(features)
    at = range(len(features))
    axes.barh(at, [100 * each.partial for each in features], color=_ORANGE, label="partial")
    axes.barh(at, [100 * each.exact for each in features], color=_BLUE, label="exact")
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of ids")
    _legend_above(axes)
    return _svg(axes)


@plot_style()
def factor_plot(report: TableAnalysis) -> Html:
    """DedupeFactors of each feature: as the table is, by session, partial; and as predicted."""
    features = shown_features(report)
    axes = _feature_axes(features)
    at = range(len(features))
    by_session = [each.measured_by_session for each in features]
    predicted = [each.predicted_by_session for each in features]
    partial = [_bounded(each.partial_factor, max(by_session)) for each in features]
    axes.barh(at, partial, color=_ORANGE, label="partial, by session")
    axes.barh(at, by_session, 0.6, color=_BLUE, label="exact, by session")
    if not report.clustered:
        as_is = [each.measured_as_is for each in features]
        axes.barh(at, as_is, 0.35, color=_GREY, label="exact, as it is")
    axes.plot(predicted, at, "|", color="black", markersize=9, label="predicted, by session")
    axes.axvline(1.5, color=_GREEN, linestyle="--", linewidth=1, label="worth it from here")
    axes.set_xlabel("DedupeFactor")
    _legend_above(axes)
    return _svg(axes)


@plot_style()
def storage_plot(report: TableAnalysis) -> Html:
    """Bytes of the features of a row, as they are and by session."""
    rows = list(storage_rows(report.storage))
    colors = [_GREY] * (len(rows) - 2) + [_BLUE, _BLUE]
    axes = _axes(8, 0.5 + 0.4 * len(rows))
    axes.barh([what for what, _ in rows], [size for _, size in rows], color=colors)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("bytes a row")
    return _svg(axes)


def shown_features(report: TableAnalysis) -> list[FeatureReport]:
    """The features with the most ids, as many as a plot shows, in the order of the table."""
    largest = sorted(report.features, key=lambda each: -each.length)[:MAX_FEATURES]
    return [each for each in report.features if each in largest]


def _axes(width: float, height: float) -> Axes:
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _feature_axes(features: Sequence[FeatureReport]) -> Axes:
    axes = _axes(8, 1.2 + 0.2 * len(features))
    axes.set_yticks(range(len(features)), [each.name for each in features])
    axes.set_ylim(len(features) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    return axes


def _legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))


def _bounded(value: float, others: float) -> float:
    """A factor without bound, where every row but the first repeats, ends the axis."""
    return min(value, max(20.0, 2 * others))


def _svg(axes: Axes) -> Html:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return svg_of(figure)

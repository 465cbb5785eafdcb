"""The plots of a report, as SVG to stand in a page."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugin_recd.analyze.table_analysis import FeatureReport, TableAnalysis
from recd_plugin_recd.analyze.words import session_rows, storage_rows
from recd_plugins.api.pages import COLORS, Html, plot_style, svg_of

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

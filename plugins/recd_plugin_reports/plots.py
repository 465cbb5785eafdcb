"""Plots of runs, as SVG to stand in a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugin_reports.runs import Run
from recd_plugins.api.pages import COLORS, Html, plot_style, svg_of

# Steps of a curve are averaged where there are more: no screen shows more points.
_POINTS = 400


@plot_style()
def loss_plot(runs: Sequence[Run]) -> Html:
    """Losses by step; runs whose losses are the same have one curve."""
    axes = _axes(4.0)
    for number, group in enumerate(same_curves(runs)):
        losses = [math.nan if loss is None else loss for loss in group[0].losses]
        width = math.ceil(len(losses) / _POINTS)
        parts = [losses[start : start + width] for start in range(0, len(losses), width)]
        axes.plot(
            [start * width + (len(part) + 1) / 2 for start, part in enumerate(parts)],
            [sum(part) / len(part) for part in parts],
            color=_color(number),
            label=" = ".join(run.name for run in group),
            marker="o" if len(parts) == 1 else None,
        )
    axes.set(xlabel="step", ylabel="loss")
    if len(runs) > 1:
        axes.legend()
    return _svg(axes)


@plot_style()
def curve_plot(steps: Sequence[int], values: Sequence[float | None], name: str) -> Html:
    """A figure by step; None where it was not finite."""
    axes = _axes(3.0)
    axes.plot(steps, [math.nan if value is None else value for value in values], marker="o")
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    return _svg(axes)


@plot_style()
def stacked_plot(parts: Mapping[str, Mapping[str, float]], unit: str) -> Html:
    """A bar a run, of the parts of a whole.

    Args:
        parts: amounts by part, by name of a run; those of zero are left out.
        unit: of the amounts.
    """
    axes = _axes(1.3 + 0.55 * len(parts))
    names = list(dict.fromkeys(part for amounts in parts.values() for part in amounts))
    starts = dict.fromkeys(parts, 0.0)
    for number, name in enumerate(names):
        widths = [amounts.get(name, 0.0) for amounts in parts.values()]
        if not any(widths):
            continue
        axes.barh(
            list(parts),
            widths,
            left=list(starts.values()),
            height=0.6,
            color=_color(number),
            label=name.replace("_", " "),
        )
        starts = {
            run: start + width for (run, start), width in zip(starts.items(), widths, strict=True)
        }
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(axes)


def same_curves(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose losses are the same but for rounding, together."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if run.same_losses(group[0]) is not None:
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _axes(height: float) -> Axes:
    return Figure(figsize=(8, height), layout="constrained").subplots()


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _svg(axes: Axes) -> Html:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return svg_of(figure)

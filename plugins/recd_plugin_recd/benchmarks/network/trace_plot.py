"""Steps on the link, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from recd_plugin_recd.benchmarks.network.link_trace import LinkTrace
from recd_plugins.testing.svg import COLORS, GREY, write_svg

_STAGES = ("lookup", "gemm", "other", "all_to_all", "all_reduce")
_BIN_MS = 3.0
# Across the picture: what is nearer to one another is one bar.
_DOTS = 1000


def draw_traces(path: Path, traces: Mapping[str, tuple[LinkTrace, float]]) -> None:
    """A picture of a step of each side: of the first rank, and the rate of its link."""
    write_svg(path, 0.4 + 2.4 * len(traces), partial(_draw, traces))


def _draw(traces: Mapping[str, tuple[LinkTrace, float]], figure: Figure) -> None:
    panels = figure.subplots(len(traces), 1, squeeze=False)
    for (axes,), (name, (trace, rate)) in zip(panels, traces.items(), strict=True):
        count = max(1, int(trace.end / _BIN_MS))
        times = [trace.end * number / count for number in range(count + 1)]
        shares = [trace.share(a, b, rate) for a, b in pairwise(times)]
        for way, sign, label in ((0, 1, "sent"), (1, -1, "received")):
            # Buckets of the shaped link pass more for a moment.
            values = [sign * min(1.0, share[way]) for share in shares]
            axes.stairs(values, times, fill=True, color=GREY, alpha=0.9 - 0.3 * way, label=label)
        for number, stage in enumerate(_STAGES):
            spans = [(a, b) for each, a, b in trace.thread if each == stage]
            bars = [(a, b - a) for a, b in _visible(spans, trace.end / _DOTS)]
            axes.broken_barh(bars, (1.15, 0.25), color=COLORS[number % len(COLORS)], label=stage)
        for row, (call, start, end) in enumerate(sorted(trace.collectives, key=lambda c: c[1])):
            color = COLORS[_STAGES.index("all_reduce" if "reduce" in call else "all_to_all")]
            y = 1.6 + 0.12 * (row % 8)
            axes.plot([max(0.0, start), end], [y, y], color=color, linewidth=2)
        axes.set_xlim(0, trace.end)
        axes.set_ylim(-1.05, 3.1)
        axes.set_yticks([-1, 0, 1, 1.27, 2], ["1", "0", "1", "thread", "in flight"])
        axes.set_title(name, loc="left")
        axes.set_xlabel("ms")
        axes.legend(frameon=False, fontsize=7, ncols=7, loc="upper left")


def _visible(spans: Iterable[tuple[float, float]], dot: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start - found[-1][1] < dot:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found

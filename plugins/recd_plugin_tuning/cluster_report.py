"""A measured cluster as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from recd_plugin_tuning.cluster import MeasuredCluster
from recd_plugin_tuning.collectives import NAMES, fit_rates
from recd_plugin_tuning.rank_work import WORKS
from recd_plugins.api import file_utils, plots, stage_costs, text_table, text_utils

_FAR_APART = 2
_UNITS = {
    "matmul": ("GFLOP/s", 1e9),
    "unique": ("million ids/s", 1e6),
    "operators": ("thousand/s", 1e3),
}


def render(found: MeasuredCluster) -> RenderableType:
    """Return tables of collectives and work, with the middle half of rounds or ranks."""
    return Group(_collectives(found), _work(found))


def far_apart(found: MeasuredCluster) -> str:
    """Return a message about measurements whose middle half spans a factor of 2, or nothing."""
    largest = {NAMES[name]: max(found.sweeps[name].items())[1] for name, _ in _sending(found)}
    works = {WORKS[name]: spread for name, spread in found.work.rates.items()}
    timed = {str(each): spread for each, spread in found.work.timed.items()}
    apart = [
        f"{name} {spread.high / spread.low:.1f}x"
        for name, spread in (largest | works | timed).items()
        if spread.high >= _FAR_APART * spread.low
    ]
    where = "as they do where ranks share cores, and where other programs run"
    return f"rounds lie far apart ({'; '.join(apart)}), {where}" if apart else ""


def _sending(found: MeasuredCluster) -> Iterator[tuple[str, stage_costs.CollectiveRate]]:
    """Collectives that send anything: not of a rank alone in its node, or a node alone."""
    spec = found.machine
    sends = {"a2a_intra": spec.ranks_per_node > 1, "ar_cross": spec.nodes > 1}
    return (each for each in fit_rates(found.sweeps) if sends.get(each[0], spec.world_size > 1))


def _collectives(found: MeasuredCluster) -> Table:
    caption = (
        f"beside products {found.hidden:.0%} of an all-reduce is hidden; while others wait a "
        f"rank takes {found.alone:.2f} of what it takes while all compute; each collective of "
        f"a sharded module takes {found.collective * 1e3:.2f} ms, however little it sends; a "
        f"step of small dense layers takes {found.dense * 1e3:.2f} ms with its all-reduce"
    )
    numbers = ["latency, ms", "MB/s", "largest", "took, ms", "middle half"]
    table = text_table("", ["collectives"], numbers, caption=caption)
    for name, rate in _sending(found):
        size, spread = max(found.sweeps[name].items())
        table.add_row(
            NAMES[name],
            f"{rate.seconds * 1e3:.3f}",
            f"{rate.bytes_per_second / 1e6:,.1f}",
            text_utils.size_text(size),
            f"{spread.median * 1e3:,.2f}",
            f"{spread.low * 1e3:,.2f} - {spread.high * 1e3:,.2f}",
        )
    return table


def _work(found: MeasuredCluster) -> Table:
    table = text_table("", ["a rank, while all of its node do the same"], ["", "middle half"])
    shown = [
        (WORKS[name], spread, *_UNITS.get(name, ("GB/s", 1e9)))
        for name, spread in found.work.rates.items()
    ]
    shown += [(str(each), spread, "ms", 1e-3) for each, spread in found.work.timed.items()]
    for words, spread, unit, of_one in shown:
        middle = f"{spread.low / of_one:,.2f} - {spread.high / of_one:,.2f}"
        table.add_row(words, f"{spread.median / of_one:,.2f} {unit}", middle)
    return table


@plots.plot_style()
def plot(found: MeasuredCluster, path: Path) -> None:
    """Plot seconds of collectives by size with their fit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, rate) in zip(plots.COLORS, _sending(found), strict=False):
        points = found.sweeps[name]
        of_bytes, spreads = list(points), list(points.values())
        middle = [spread.median * 1e3 for spread in spreads]
        errors = [
            [(spread.median - spread.low) * 1e3 for spread in spreads],
            [(spread.high - spread.median) * 1e3 for spread in spreads],
        ]
        fitted = [(rate.seconds + size / rate.bytes_per_second) * 1e3 for size in of_bytes]
        axes.errorbar(of_bytes, middle, yerr=errors, fmt="o", color=color, label=NAMES[name])
        axes.plot(of_bytes, fitted, color=color, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a rank", ylabel="ms")
    axes.set(title="Collectives; lines: latency and bandwidth")
    if found.machine.world_size > 1:
        axes.legend()
    spec = found.machine
    figure.suptitle(f"{spec.nodes} x {spec.ranks_per_node} ranks on {spec.device}")
    file_utils.write_figure(path, figure)

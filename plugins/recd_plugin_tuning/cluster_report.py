"""A measured cluster as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from recd_plugin_tuning.cluster import NAMES, Link, MeasuredCluster, fit_rates
from recd_plugin_tuning.rank_work import WORKS, MiddleHalf
from recd_plugins.api import COLORS, CollectiveRate, plot_style, size_text, write_figure

_FAR_APART = 2


def render(found: MeasuredCluster) -> RenderableType:
    """What was found, each figure with between what the middle half of rounds or ranks lies."""
    return Group(_links(found), _collectives(found), _work(found))


def far_apart(found: MeasuredCluster) -> str:
    """What took, in the middle half of its rounds, now ``_FAR_APART`` times what it took then.

    Empty where nothing did.
    """
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


def _sending(found: MeasuredCluster) -> Iterator[tuple[str, CollectiveRate]]:
    """The collectives in which anything is sent, as fitted.

    A rank that is alone in its node, or a node that is, sends to nobody.
    """
    sends = {"a2a_intra": found.inside, "ar_cross": found.between}
    return (
        each
        for each in fit_rates(found.sweeps)
        if sends.get(each[0], [*found.inside, *found.between])
    )


def _links(found: MeasuredCluster) -> Table:
    table = _table("links of a rank, one way", "latency, ms", "MB/s", "middle half", "slowest")
    for words, of, links in (
        ("in a node", "rank", found.inside),
        ("between nodes", "node", found.between),
    ):
        if not links:
            continue
        rates = MiddleHalf.of([link.rate.bytes_per_second / 1e6 for link in links])
        slowest = min(links, key=lambda link: link.rate.bytes_per_second)
        table.add_row(
            words,
            f"{median(link.rate.seconds for link in links) * 1e3:.3f}",
            f"{rates.median:,.1f}",
            f"{rates.low:,.1f} - {rates.high:,.1f}",
            f"{of} {slowest.source} to {slowest.target}: "
            f"{slowest.rate.bytes_per_second / 1e6:,.1f}",
        )
    if not found.inside and not found.between:
        table.add_row("one rank alone has none", "", "", "", "")
    return table


def _collectives(found: MeasuredCluster) -> Table:
    table = _table("collectives", "latency, ms", "MB/s", "largest", "took, ms", "middle half")
    for name, rate in _sending(found):
        size, spread = max(found.sweeps[name].items())
        table.add_row(
            NAMES[name],
            f"{rate.seconds * 1e3:.3f}",
            f"{rate.bytes_per_second / 1e6:,.1f}",
            size_text(size),
            f"{spread.median * 1e3:,.2f}",
            f"{spread.low * 1e3:,.2f} - {spread.high * 1e3:,.2f}",
        )
    if not found.inside and not found.between:
        table.add_row("one rank alone has none", "", "", "", "", "")
    else:
        table.caption = (
            f"beside products {found.hidden:.0%} of an all-reduce is hidden; while others wait a "
            f"rank takes {found.alone:.2f} of what it takes while all compute; each collective of "
            f"a sharded module takes {found.collective * 1e3:.2f} ms, however little it sends; a "
            f"step of small dense layers takes {found.dense * 1e3:.2f} ms with its all-reduce"
        )
        table.caption_justify = "left"
    return table


_UNITS = {
    "matmul": ("GFLOP/s", 1e9),
    "unique": ("million ids/s", 1e6),
    "operators": ("thousand/s", 1e3),
}


def _work(found: MeasuredCluster) -> Table:
    table = _table("a rank, while all of its node do the same", "", "middle half")
    for name, spread in found.work.rates.items():
        unit, of_one = _UNITS.get(name, ("GB/s", 1e9))
        low, high = spread.low / of_one, spread.high / of_one
        table.add_row(
            WORKS[name], f"{spread.median / of_one:,.1f} {unit}", f"{low:,.1f} - {high:,.1f}"
        )
    for each, spread in found.work.timed.items():
        table.add_row(
            str(each),
            f"{spread.median * 1e3:,.2f} ms",
            f"{spread.low * 1e3:,.2f} - {spread.high * 1e3:,.2f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


@plot_style()
def plot(found: MeasuredCluster, path: Path) -> None:
    """Plot seconds of collectives by size with their fit, and bandwidths of links."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    sizes, links = figure.subplots(1, 2)
    for color, (name, rate) in zip(COLORS, _sending(found), strict=False):
        points = found.sweeps[name]
        of_bytes, spreads = list(points), list(points.values())
        middle = [spread.median * 1e3 for spread in spreads]
        errors = [
            [(spread.median - spread.low) * 1e3 for spread in spreads],
            [(spread.high - spread.median) * 1e3 for spread in spreads],
        ]
        fitted = [(rate.seconds + size / rate.bytes_per_second) * 1e3 for size in of_bytes]
        sizes.errorbar(of_bytes, middle, yerr=errors, fmt="o", color=color, label=NAMES[name])
        sizes.plot(of_bytes, fitted, color=color, linewidth=1)
    sizes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes of a rank",
        ylabel="ms",
        title="Collectives; lines: latency and bandwidth",
    )
    if found.inside or found.between:
        sizes.legend()
    for label, color, of in (
        ("in a node", COLORS[0], found.inside),
        ("between nodes", COLORS[1], found.between),
    ):
        if of:
            places, heights = zip(*_sorted(of), strict=True)
            links.plot(places, heights, "o", color=color, label=label)
    if found.inside and found.between:
        links.set_yscale("log")
    elif found.inside or found.between:
        # What is left above the fastest is a share of how far links lie apart: like ones are cut.
        links.set_ylim(0, 1.05 * links.get_ylim()[1])
    if found.inside or found.between:
        links.legend()
    links.set(
        xlabel="share of links that are slower", ylabel="MB/s", title="Links of a rank, one way"
    )
    spec = found.machine
    figure.suptitle(f"{spec.nodes} x {spec.ranks_per_node} ranks on {spec.device}")
    write_figure(path, figure)


def _sorted(links: Sequence[Link]) -> Iterator[tuple[float, float]]:
    rates = sorted(link.rate.bytes_per_second / 1e6 for link in links)
    return ((place / max(1, len(rates) - 1), rate) for place, rate in enumerate(rates))

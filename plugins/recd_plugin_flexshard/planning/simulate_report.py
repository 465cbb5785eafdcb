"""The report of ``recd simulate``: in a terminal, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_flexshard.planning.simulate import PlayedSide, Simulation, imbalance
from recd_plugin_flexshard.planning.tier_plan_report import topology_json
from recd_plugin_flexshard.planning.traffic import TIERS, TierTraffic, traffic
from recd_plugins.api.files import write_figure
from recd_plugins.api.pages import plot_style
from recd_plugins.api.planning import TopologySpec, size_text, topology_line

_NAMES = {
    "cold": "cold: all-to-all",
    "hot": "hot: all-reduce",
    "flex": "flex: all-to-all in a node",
    "flex_gradients": "flex: all-reduce across",
}


@dataclass(frozen=True)
class SimulationReport:
    """What was played.

    Attributes:
        topology: its name.
        spec: the ranks.
        entries: by sharding entry of the registry, as ``sharding[0]``.
    """

    topology: str
    spec: TopologySpec
    entries: Mapping[str, Simulation]

    def as_json(self) -> dict[str, Any]:
        """JSON values; bytes are those of a step."""
        return {
            "topology": topology_json(self.topology, self.spec),
            "entries": {field: _entry_json(played) for field, played in self.entries.items()},
        }


def _entry_json(played: Simulation) -> dict[str, Any]:
    plan = played.plan
    return {
        "strategy": plan.strategy,
        "batch_size": plan.cluster.batch_size,
        "source": played.source,
        "steps": played.steps,
        "tables": {
            table.name: {"hot": table.hot, "flex": table.flex, "cold": table.cold}
            for table in plan.tables
        },
        "a2a_reduction": {"simulated": played.a2a_reduction, "predicted": plan.a2a_reduction},
        "tiered": _side_json(played.tiered) | {"predicted": _predicted_json(played)},
        "row_wise": _side_json(played.row_wise),
    }


def _predicted_json(played: Simulation) -> dict[str, Any]:
    plan = played.plan
    return {
        "tiers": {tier: asdict(sent) for tier, sent in traffic(plan).items()},
        "seconds": asdict(plan.seconds),
        "memory_bytes": plan.memory_bytes,
    }


def _side_json(side: PlayedSide) -> dict[str, Any]:
    return {
        "tiers": {
            name: {
                "collective": tier.collective,
                "group": tier.group,
                "sent_bytes": _spread(tier.sent),
                "integer_bytes": _spread(tier.sent_integers),
                "float_bytes": _spread(tier.sent_floats),
                "received_bytes": _spread(tier.received),
                "seconds": float(tier.seconds.mean()),
            }
            for name, tier in side.tiers.items()
        },
        "seconds": asdict(side.seconds),
        "lookups": _spread(side.lookups),
        "imbalance": {"received": imbalance(side.received), "lookups": imbalance(side.lookups)},
        "memory_bytes": {"mean": float(side.memory.mean()), "max": float(side.memory.max())},
    }


def _spread(by_rank: NDArray[np.int64]) -> dict[str, float]:
    """Over ranks, of a step: the mean, and the rank with most, the mean over steps."""
    return {"mean": float(by_rank.mean()), "max": float(by_rank.max(1).mean())}


def render(report: SimulationReport) -> RenderableType:
    """The topology, then each entry: what is sent, times, memory and balance."""
    parts: list[RenderableType] = [topology_line(report.topology, report.spec)]
    for field, played in report.entries.items():
        parts += ["", *_entry(field, played)]
    return Group(*parts)


def _entry(field: str, played: Simulation) -> list[RenderableType]:
    plan = played.plan
    steps = f"{played.steps} step" + "s" * (played.steps > 1)
    tables = f"{len(plan.tables)} table" + "s" * (len(plan.tables) > 1)
    return [
        Text(
            f"{field}, {plan.strategy}: {tables}, {steps} of {plan.cluster.batch_size:,} rows a "
            f"rank, {played.source}"
        ),
        _collectives(played),
        _ranks(played),
        Text(
            f"All-to-all of all ranks: {played.a2a_reduction:.1%} fewer bytes of embeddings than "
            f"row-wise; the plan predicts {plan.a2a_reduction:.1%}"
        ),
    ]


def _collectives(played: Simulation) -> Table:
    table = Table(title="Bytes that a rank sends in a step", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("mean", "max", "predicted", "ms", "predicted"):
        table.add_column(heading, justify="right", overflow="fold")
    stock = played.row_wise.tiers["cold"]
    expected = played.plan.row_wise_seconds
    table.add_row(
        "row-wise: all-to-all",
        *_sent(stock.sent),
        "",
        f"{stock.seconds.mean() * 1e3:,.3f}",
        f"{expected.a2a_global * 1e3:,.3f}",
        end_section=True,
    )
    predicted: Mapping[Any, TierTraffic] = traffic(played.plan)
    for name in TIERS:
        if name in played.tiered.tiers:
            tier = played.tiered.tiers[name]
            table.add_row(
                _NAMES[name],
                *_sent(tier.sent),
                size_text(predicted[name].bytes),
                f"{tier.seconds.mean() * 1e3:,.3f}",
                f"{predicted[name].seconds * 1e3:,.3f}",
            )
    return table


def _sent(by_rank: NDArray[np.int64]) -> tuple[str, str]:
    spread = _spread(by_rank)
    return size_text(spread["mean"]), size_text(spread["max"])


def _ranks(played: Simulation) -> Table:
    table = Table(title="Ranks", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "row-wise", "tiers", "predicted"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    sides, plan = (played.row_wise, played.tiered), played.plan
    overlap = plan.options.overlap
    table.add_row(
        "ms in collectives",
        *(f"{side.seconds.exposed() * 1e3:,.3f}" for side in sides),
        f"{plan.seconds.exposed() * 1e3:,.3f}",
    )
    if overlap:
        table.add_row(
            f"ms exposed at {overlap:.0%} overlap",
            *(f"{side.seconds.exposed(overlap) * 1e3:,.3f}" for side in sides),
            f"{plan.seconds.exposed(overlap) * 1e3:,.3f}",
        )
    table.add_row("memory, mean", *(size_text(side.memory.mean()) for side in sides), "")
    table.add_row(
        "memory, fullest rank",
        *(size_text(side.memory.max()) for side in sides),
        size_text(plan.memory_bytes),
    )
    for name, by_rank in (
        ("bytes received, max / mean", [side.received for side in sides]),
        ("ids looked up, max / mean", [side.lookups for side in sides]),
    ):
        table.add_row(name, *(f"{imbalance(each):.2f}" for each in by_rank), "")
    return table


@plot_style()
def plot(report: SimulationReport, path: Path) -> None:
    """A plot by entry of what ranks get, from the most to the least, and of the times.

    Args:
        report: what to show.
        path: a file whose suffix says its format, as ``.png`` or ``.svg``.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4 * len(report.entries)), layout="constrained")
    grid = figure.subplots(len(report.entries), 2, squeeze=False)
    for (ranks, times), (field, played) in zip(grid, report.entries.items(), strict=True):
        sides = {"row-wise": played.row_wise, "tiers": played.tiered}
        for name, side in sides.items():
            received = np.sort(side.received.mean(0))[::-1] / 2**20
            ranks.step(np.arange(1, len(received) + 1), received, where="mid", label=name)
        ranks.set(
            title=f"{field}: received in all-to-alls, a step",
            xlabel="ranks, most first",
            ylabel="MiB",
            ylim=(0, None),
        )
        ranks.legend(fontsize="small")
        base = np.zeros(2)
        for tier in TIERS:
            parts = [side.tiers.get(tier) for side in sides.values()]
            heights = np.array([part.seconds.mean() * 1e3 if part else 0.0 for part in parts])
            times.bar(list(sides), heights, bottom=base, label=_NAMES[tier], width=0.5)
            base += heights
        times.set(title="Modelled time of collectives, a step", ylabel="ms")
        times.legend(fontsize="small")
    write_figure(path, figure)

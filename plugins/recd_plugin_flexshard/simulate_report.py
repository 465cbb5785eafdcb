"""The report of ``recd simulate``: in a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_flexshard.plan_report import rows_by_tier, topology_json
from recd_plugin_flexshard.planning.plan import TIERS, Tier, traffic
from recd_plugin_flexshard.planning.simulate import Counts, PlayedSide, Simulation, imbalance
from recd_plugins.api import TopologySpec, size_text, topology_line

_NAMES: dict[Tier, str] = {
    "cold": "cold: all-to-all",
    "hot": "hot: all-reduce",
    "flex": "flex: all-to-all in a node",
    "flex_gradients": "flex: all-reduce across",
}


def as_json(topology: str, spec: TopologySpec, entries: Mapping[str, Simulation]) -> dict[str, Any]:
    """Return JSON values; bytes are those of a step."""
    return {
        "topology": topology_json(topology, spec),
        "entries": {field: _entry_json(played) for field, played in entries.items()},
    }


def _entry_json(played: Simulation) -> dict[str, Any]:
    plan = played.plan
    predicted = {
        "tiers": {tier: asdict(sent) for tier, sent in traffic(plan).items()},
        "seconds": asdict(plan.seconds),
        "memory_bytes": plan.memory_bytes,
    }
    return {
        "strategy": plan.strategy,
        "batch_size": plan.cluster.batch_size,
        "source": played.source,
        "steps": played.steps,
        "tables": rows_by_tier(plan),
        "a2a_reduction": {"simulated": played.a2a_reduction, "predicted": plan.a2a_reduction},
        "tiered": _side_json(played.tiered) | {"predicted": predicted},
        "row_wise": _side_json(played.row_wise),
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


def _spread(by_rank: Counts) -> dict[str, float]:
    """Return the mean over ranks of a step, and the rank with most, the mean over steps."""
    return {"mean": float(by_rank.mean()), "max": float(by_rank.max(1).mean())}


def render(topology: str, spec: TopologySpec, entries: Mapping[str, Simulation]) -> RenderableType:
    """Return the terminal report; arguments as ``as_json``."""
    parts: list[RenderableType] = [topology_line(topology, spec)]
    for field, played in entries.items():
        plan = played.plan
        steps = f"{played.steps} step" + "s" * (played.steps > 1)
        tables = f"{len(plan.tables)} table" + "s" * (len(plan.tables) > 1)
        parts += [
            "",
            Text(
                f"{field}, {plan.strategy}: {tables}, {steps} of {plan.cluster.batch_size:,} rows "
                f"a rank, {played.source}"
            ),
            _collectives(played),
            _ranks(played),
            Text(
                f"All-to-all of all ranks: {played.a2a_reduction:.1%} fewer bytes of embeddings "
                f"than row-wise; the plan predicts {plan.a2a_reduction:.1%}"
            ),
        ]
    return Group(*parts)


def _collectives(played: Simulation) -> Table:
    table = Table(title="Bytes that a rank sends in a step", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("mean", "max", "predicted", "ms", "predicted"):
        table.add_column(heading, justify="right", overflow="fold")
    predicted = traffic(played.plan)
    expected = played.plan.row_wise_seconds.a2a_global
    lines = [("row-wise: all-to-all", played.row_wise.tiers["cold"], "", expected)]
    lines += [
        (_NAMES[name], tier, size_text(predicted[name].bytes), predicted[name].seconds)
        for name in TIERS
        if (tier := played.tiered.tiers.get(name)) is not None
    ]
    for name, tier, num_bytes, seconds in lines:
        table.add_row(
            name,
            *map(size_text, _spread(tier.sent).values()),
            num_bytes,
            f"{tier.seconds.mean() * 1e3:,.3f}",
            f"{seconds * 1e3:,.3f}",
            end_section=not num_bytes,
        )
    return table


def _ranks(played: Simulation) -> Table:
    table = Table(title="Ranks", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "row-wise", "tiers", "predicted"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    sides, plan = (played.row_wise, played.tiered), played.plan
    for overlap in sorted({0.0, plan.options.overlap}):
        name = f"ms exposed at {overlap:.0%} overlap" if overlap else "ms in collectives"
        seconds = [each.seconds.exposed(overlap) for each in (*sides, plan)]
        table.add_row(name, *(f"{each * 1e3:,.3f}" for each in seconds))
    table.add_row("memory, mean", *(size_text(side.memory.mean()) for side in sides), "")
    fullest = (*(side.memory.max() for side in sides), plan.memory_bytes)
    table.add_row("memory, fullest rank", *map(size_text, fullest))
    for name, by_rank in (
        ("bytes received, max / mean", [side.received for side in sides]),
        ("ids looked up, max / mean", [side.lookups for side in sides]),
    ):
        table.add_row(name, *(f"{imbalance(each):.2f}" for each in by_rank), "")
    return table

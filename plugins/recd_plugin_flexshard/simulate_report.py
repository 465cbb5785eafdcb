"""The report of ``recd simulate``, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_flexshard.plan_report import rows_by_tier, topology_json
from recd_plugin_flexshard.planning.plan import Tier, traffic
from recd_plugin_flexshard.planning.simulate import Counts, PlayedSide, Simulation, imbalance
from recd_plugins.api import text_table, text_utils, topologies, topology_line

_NAMES: dict[Tier, str] = {
    "cold": "cold: all-to-all",
    "hot": "hot: all-reduce",
    "flex": "flex: all-to-all in a node",
    "flex_gradients": "flex: all-reduce across",
}


def as_json(
    topology: str, spec: topologies.TopologySpec, entries: Mapping[str, Simulation]
) -> dict[str, Any]:
    """Return the report of ``recd simulate`` as JSON values. Bytes and seconds are per step.

    Args:
        topology: name of the topology.
        spec: the topology.
        entries: the simulation of each sharding entry, keyed by ``sharding[N]``.
    """
    return {
        "topology": topology_json(topology, spec),
        "entries": {
            field: {
                "strategy": played.plan.strategy,
                "batch_size": played.plan.cluster.batch_size,
                "source": played.source,
                "steps": played.steps,
                "tables": rows_by_tier(played.plan),
                "a2a_reduction": {
                    "simulated": played.a2a_reduction,
                    "predicted": played.plan.a2a_reduction,
                },
                "predicted": {
                    "tiers": {name: asdict(sent) for name, sent in traffic(played.plan).items()},
                    "seconds": asdict(played.plan.seconds),
                },
                "tiered": _side_json(played.tiered),
                "row_wise": _side_json(played.row_wise),
            }
            for field, played in entries.items()
        },
    }


def _side_json(side: PlayedSide) -> dict[str, Any]:
    return {
        "tiers": {
            name: {"sent_bytes": _spread(tier.sent), "seconds": float(tier.seconds.mean())}
            for name, tier in side.tiers.items()
        },
        "seconds": asdict(side.seconds),
        "lookups": _spread(side.lookups),
        "imbalance": {"sent": imbalance(side.sent), "lookups": imbalance(side.lookups)},
    }


def _spread(by_rank: Counts) -> dict[str, float]:
    """Return ``mean`` and ``max`` of ``by_rank`` over ranks, each averaged over steps."""
    return {"mean": float(by_rank.mean()), "max": float(by_rank.max(1).mean())}


def render(
    topology: str, spec: topologies.TopologySpec, entries: Mapping[str, Simulation]
) -> RenderableType:
    """Return the report of ``recd simulate`` for a terminal, with the arguments of ``as_json``."""
    parts: list[RenderableType] = [topology_line(topology, spec)]
    for field, played in entries.items():
        plan = played.plan
        parts += [
            "",
            Text(
                f"{field}, {plan.strategy}: tables: {len(plan.tables)}, steps: {played.steps} of "
                f"{plan.cluster.batch_size:,} rows per rank, {played.source}"
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
    headings = "mean", "max", "predicted", "ms", "predicted"
    table = text_table("Bytes sent per rank and step, and time in ms", [""], headings)
    table.columns[0].no_wrap = True
    predicted = traffic(played.plan)
    expected = played.plan.row_wise_seconds.a2a_global
    lines = [("row-wise: all-to-all", played.row_wise.tiers["cold"], "", expected)]
    for name, tier in played.tiered.tiers.items():
        sent = predicted[name]
        lines.append((_NAMES[name], tier, text_utils.size_text(sent.bytes), sent.seconds))
    for heading, tier, num_bytes, seconds in lines:
        table.add_row(
            heading,
            *map(text_utils.size_text, _spread(tier.sent).values()),
            num_bytes,
            f"{tier.seconds.mean() * 1e3:,.3f}",
            f"{seconds * 1e3:,.3f}",
            end_section=not num_bytes,
        )
    return table


def _ranks(played: Simulation) -> Table:
    table = text_table("Ranks", [""], ["row-wise", "tiers", "predicted"])
    sides, plan = (played.row_wise, played.tiered), played.plan
    for overlap in sorted({0.0, plan.options.overlap}):
        name = f"ms exposed at {overlap:.0%} overlap" if overlap else "ms in collectives"
        seconds = [each.seconds.exposed(overlap) for each in (*sides, plan)]
        table.add_row(name, *(f"{each * 1e3:,.3f}" for each in seconds))
    for name, by_rank in (
        ("bytes sent, max / mean", [side.sent for side in sides]),
        ("ids looked up, max / mean", [side.lookups for side in sides]),
    ):
        table.add_row(name, *(f"{imbalance(each):.2f}" for each in by_rank), "")
    return table

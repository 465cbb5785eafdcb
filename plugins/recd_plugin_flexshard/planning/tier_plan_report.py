"""What ``recd plan --tiers`` finds: tiers of each sharding entry, and what others would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recd_plugin_flexshard.planning.cluster import CollectiveSeconds
from recd_plugin_flexshard.planning.plan import Strategy, TierPlan
from recd_plugin_flexshard.planning.traffic import sync_bytes
from recd_plugins.api.planning import TopologySpec

#: Strategies that stand side by side.
STRATEGIES: tuple[Strategy, ...] = ("two_tier", "three_tier", "joint")


@dataclass(frozen=True)
class TierRows:
    """The tiers of a table, or of several together.

    Attributes:
        name: of the table.
        rows: of it.
        length: mean accesses of a sample: the paper's L.
        hot: data-parallel rows; ``hot_share``: of the accesses, as the next ones.
        flex: rows of the flex tier.
    """

    name: str
    rows: int
    length: float
    hot: int
    hot_share: float
    flex: int
    flex_share: float

    @property
    def cold(self) -> int:
        """Rows that are row-wise alone."""
        return self.rows - self.hot - self.flex

    @property
    def cold_share(self) -> float:
        """The cold share of the accesses."""
        return max(0.0, 1.0 - self.hot_share - self.flex_share)

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"cold": self.cold, "cold_share": self.cold_share}


@dataclass(frozen=True)
class EntryTiers:
    """One sharding entry.

    Attributes:
        field: where it stands in the registry, as ``sharding[0]``.
        plugin: its name.
        plan: what it chose.
        alternatives: the same tables by strategy; the one of ``plan`` is ``plan``.
        problems: why a strategy has none, by strategy.
        points: of two tiers, by name: FlexShard's four.
        curves: by strategy: plans from few to many replicated rows.
    """

    field: str
    plugin: str
    plan: TierPlan
    alternatives: Mapping[Strategy, TierPlan]
    problems: Mapping[Strategy, str]
    points: Mapping[str, TierPlan]
    curves: Mapping[Strategy, Sequence[TierPlan]]

    @property
    def tables(self) -> tuple[TierRows, ...]:
        """The tables of ``plan``, in its order."""
        return tuple(
            TierRows(
                table.name,
                table.demand.num_embeddings,
                table.demand.length,
                table.hot,
                table.hot_share,
                table.flex,
                table.flex_share,
            )
            for table in self.plan.tables
        )

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        plan = self.plan
        return {
            "entry": self.field,
            "plugin": self.plugin,
            "strategy": plan.strategy,
            "options": asdict(plan.options),
            "tables": [table.as_json() for table in self.tables],
            "row_wise": {
                "memory_bytes": plan.row_wise_memory_bytes,
                "seconds": _seconds(plan.row_wise_seconds, plan.options.overlap),
            },
            "strategies": {name: _plan_json(plan) for name, plan in self.alternatives.items()},
            "problems": dict(self.problems),
            "points": {name: _point_json(point) for name, point in self.points.items()},
            "curves": {
                name: [_point_json(point) for point in curve] for name, curve in self.curves.items()
            },
        }


@dataclass(frozen=True)
class TiersReport:
    """The tiers of all sharding entries that have some.

    Attributes:
        topology: its name.
        spec: nodes and ranks.
        batch_size: rows of a rank.
        what_if: options of the cost model that stand in for the entries' own.
        entries: in the order of the registry.
    """

    topology: str
    spec: TopologySpec
    batch_size: int
    what_if: Mapping[str, float]
    entries: tuple[EntryTiers, ...]

    def as_json(self) -> dict[str, Any]:
        """What ``recd plan --tiers --json`` writes."""
        return {
            "topology": topology_json(self.topology, self.spec),
            "batch_size": self.batch_size,
            "what_if": dict(self.what_if),
            "entries": [entry.as_json() for entry in self.entries],
        }


def topology_json(name: str, spec: TopologySpec) -> dict[str, Any]:
    """A topology as reports have it, with the collectives that are planned with."""
    return {
        "name": name,
        **spec.model_dump(),
        "world_size": spec.world_size,
        "collectives": spec.collective_rates.model_dump(),
        "collectives_measured": spec.collectives is not None,
    }


def merged(plan: TierPlan) -> TierRows:
    """All tables of ``plan`` as if they were one."""
    lengths = [table.demand.length for table in plan.tables]
    total = sum(lengths)

    def share(of_table: list[float]) -> float:
        covered = sum(n * part for n, part in zip(lengths, of_table, strict=True))
        return covered / total if total else 0.0

    return TierRows(
        "all",
        sum(table.demand.num_embeddings for table in plan.tables),
        total,
        sum(table.hot for table in plan.tables),
        share([table.hot_share for table in plan.tables]),
        sum(table.flex for table in plan.tables),
        share([table.flex_share for table in plan.tables]),
    )


def _plan_json(plan: TierPlan) -> dict[str, Any]:
    return {
        "merged": merged(plan).as_json(),
        "tables": {
            table.name: {"hot": table.hot, "flex": table.flex, "cold": table.cold}
            for table in plan.tables
        },
        "memory_bytes": plan.memory_bytes,
        "a2a_reduction": plan.a2a_reduction,
        "seconds": _seconds(plan.seconds, plan.options.overlap),
        "sync": {
            tier: {"chosen": getattr(plan.syncs, tier), "bytes": by_sync}
            for tier, by_sync in sync_bytes(plan).items()
        },
    }


def _point_json(plan: TierPlan) -> dict[str, Any]:
    return {
        "hot": sum(table.hot for table in plan.tables),
        "flex": sum(table.flex for table in plan.tables),
        "memory_bytes": plan.memory_bytes,
        "a2a_reduction": plan.a2a_reduction,
        "exposed_seconds": plan.seconds.exposed(plan.options.overlap),
    }


def _seconds(seconds: CollectiveSeconds, overlap: float) -> dict[str, float]:
    return asdict(seconds) | {"total": seconds.exposed(), "exposed": seconds.exposed(overlap)}

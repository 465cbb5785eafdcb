"""What ``recd plan --cache`` finds: the cache of each table, and what more or less would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recd_plugin_scars.planning.load import TableTraffic
from recd_plugin_scars.planning.order import Memory
from recd_plugin_scars.planning.plan import CachedTable, CachePlan
from recd_plugin_scars.planning.rates import measured_rates, rates_of
from recd_plugins.api.planning import TopologySpec

#: What keeps the cache from being larger: its memory; that no further row is read often enough;
#: that the batch would be too small; that not one sample more has room.
Limit = Literal["memory", "useful", "batch", "room"]


@dataclass(frozen=True)
class CurvePoint:
    """A size of the cache.

    Attributes:
        rows: cached, of all tables.
        bytes: of the fast memory.
        batch_size: samples of a step of all ranks.
        moved: bytes that a step moves between the stores, both ways.
        seconds: of a rank for a sample; the cost model's f.
    """

    rows: int
    bytes: float
    batch_size: float
    moved: float
    seconds: float


@dataclass(frozen=True)
class CachePlanReport:
    """The plan, and what it was chosen by.

    Attributes:
        topology: its name; ``spec``: its ranks.
        source: where the reads of rows come from, in words.
        plan: the caches of all tables.
        lru_bytes: what a step would move with LRU caches of the same sizes.
        memory: bytes that were given to all ranks together; None: as much as pays.
        shared: where the batch size was searched: what rows and batch share.
        curve: sizes from nothing on.
        chosen: that of the plan.
        limit: what ended the cache.
        steps: a useful row is read more than once in so many.
        warnings: in words.
    """

    topology: str
    spec: TopologySpec
    source: str
    plan: CachePlan
    lru_bytes: float
    memory: float | None
    shared: Memory | None
    curve: Sequence[CurvePoint]
    chosen: CurvePoint
    limit: Limit
    steps: int
    warnings: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        rates = rates_of(self.spec)
        tables = list(self.plan.tables.values())
        return {
            "topology": {"name": self.topology, "ranks": self.spec.world_size},
            "costs": {**rates.model_dump(), "measured": measured_rates(self.spec) is not None},
            "reads": self.source,
            "batch_size": self.plan.batch_size,
            "memory_bytes": self.memory,
            "sample_bytes": self.shared.sample if self.shared else None,
            "steps": self.steps,
            "limit": self.limit,
            "tables": {table.load.name: _table(table) for table in tables},
            "bytes_per_step": traffic_bytes([table.traffic for table in tables])
            | {"lru": self.lru_bytes},
            "curve": [asdict(point) for point in self.curve],
            "chosen": asdict(self.chosen),
            "warnings": list(self.warnings),
        }


def traffic_bytes(tables: Sequence[TableTraffic]) -> dict[str, float]:
    """Read and written in a step, of so many tables together."""
    return {
        "plain": sum(table.plain_bytes for table in tables),
        "coalesced": sum(table.coalesced_bytes for table in tables),
        "cached": sum(table.cached_bytes for table in tables),
        "both": sum(table.bytes for table in tables),
    }


def _table(table: CachedTable) -> dict[str, Any]:
    traffic = table.traffic
    return {
        "rows": table.load.num_embeddings,
        "dim": table.load.embedding_dim,
        "read_rows": table.load.read_rows,
        "useful_rows": table.useful,
        "cached_rows": table.cached,
        "load_factor": table.load_factor,
        "cached_bytes": table.cached_bytes,
        "lookups": traffic.lookups,
        "unique_rows": traffic.unique_rows,
        "misses": traffic.misses,
        "hit_rate": traffic.hit_rate,
        "lookups_hit": table.load.covered(table.cached),
        "bytes_per_step": traffic_bytes([traffic]),
    }

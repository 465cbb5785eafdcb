"""Plans of caches, and the ``cache`` section of a topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from recd_plugin_scars.planning.load import Policy, TableLoad, TableTraffic, row_bytes, traffic
from recd_plugin_scars.planning.order import RowOrder, StepCosts

if TYPE_CHECKING:
    from recd_plugin_scars.planning.statistics import AccessStatistics
    from recd_plugins.api import topologies


#: Name of the section in a topology.
SECTION = "cache"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Seconds of an iteration however small its batch; assumed for a small model without a profiler.
_STEP_SECONDS = {"cpu": 5e-3, "cuda": 2e-3}


class CacheRates(BaseModel):
    """Measured time costs of a rank, in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample_seconds: Seconds = Field(
        default=0.0, description="Seconds per sample, without its rows."
    )
    step_seconds: Seconds = Field(
        description="Seconds per iteration, however small its batch (tau)."
    )
    byte_seconds: Seconds = Field(
        description=(
            "Seconds per byte of a row that is fetched from the backing store and written back."
        )
    )

    @classmethod
    def of_topology(cls, topology: topologies.TopologySpec) -> Self:
        """Return rates from the bandwidth bounds, both ways, and an assumed time per iteration."""
        between = topology.hbm_to_ddr_bandwidth
        bandwidth = between if between is not None else topology.ddr_bandwidth / 2
        return cls(
            step_seconds=_STEP_SECONDS[topology.device],
            byte_seconds=2 / bandwidth,
        )

    def costs(self, ranks: int) -> StepCosts:
        """Return the costs of ``ranks`` ranks together. All ranks take part in each iteration."""
        return StepCosts(self.sample_seconds, self.step_seconds * ranks, self.byte_seconds)


def measured_rates(topology: topologies.TopologySpec) -> CacheRates | None:
    """Return the rates of the ``cache`` section, or None."""
    found = topology.sections.get(SECTION)
    assert found is None or isinstance(found, CacheRates), "the package declares it"
    return found


def rates_of(topology: topologies.TopologySpec) -> CacheRates:
    """Return the rates of the ``cache`` section, or those of the bandwidth bounds."""
    return measured_rates(topology) or CacheRates.of_topology(topology)


#: Default: a row is worth caching if it is read more than once in this many steps.
STEPS = 10_000


@dataclass(frozen=True, eq=False)
class CachedTable:
    """The cache of one table.

    Attributes:
        cached: number of most read rows that stay in fast memory.
        useful: number of rows worth caching; None if unknown.
        traffic: traffic per step over all ranks.
    """

    load: TableLoad
    cached: int
    useful: int | None
    traffic: TableTraffic

    @property
    def load_factor(self) -> float:
        return self.cached / self.load.num_embeddings

    @property
    def cached_bytes(self) -> int:
        return self.cached * self.traffic.row_bytes


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The caches of several tables, for steps of ``batch_size`` samples over all ranks."""

    tables: Mapping[str, CachedTable]
    batch_size: int
    optimizer: str

    @classmethod
    def of(
        cls,
        loads: Mapping[str, TableLoad],
        cached: Mapping[str, int],
        *,
        batch_size: int,
        optimizer: str,
        useful: Mapping[str, int] | None = None,
        held: float = 0,
        policy: Policy = "static",
    ) -> CachePlan:
        """Return a plan for given cache sizes; see ``traffic`` for the other arguments."""
        moved = traffic(
            list(loads.values()),
            cached,
            batch_size=batch_size,
            optimizer=optimizer,
            held=held,
            policy=policy,
        )
        tables = {
            name: CachedTable(
                load, cached.get(name, 0), None if useful is None else useful[name], moved[name]
            )
            for name, load in loads.items()
        }
        return cls(tables, batch_size, optimizer)

    @classmethod
    def within(
        cls,
        loads: Mapping[str, TableLoad],
        num_bytes: float | None,
        *,
        batch_size: int,
        optimizer: str,
        steps: int = STEPS,
        held: float = 0,
        policy: Policy = "static",
    ) -> CachePlan:
        """Return a plan that caches the useful rows that save most traffic within ``num_bytes``.

        ``num_bytes`` is for all tables and ranks; None caches all useful rows. A row is useful if
        it is read more than once in ``steps``. See ``traffic`` for the other arguments.
        """
        order = row_order(loads, optimizer)
        useful = order.useful(steps * batch_size)
        place = useful if num_bytes is None else min(useful, order.fitting(num_bytes))
        return cls.of(
            loads,
            dict(zip(loads, order.rows(place), strict=True)),
            batch_size=batch_size,
            optimizer=optimizer,
            useful=dict(zip(loads, order.rows(useful), strict=True)),
            held=held,
            policy=policy,
        )

    def statistics(self, table: str) -> AccessStatistics:
        """Return ``CacheParams.stats`` of a table for TorchRec's planner."""
        from recd_plugin_scars.planning.statistics import AccessStatistics

        return AccessStatistics(self.tables[table].load, self.batch_size)

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of all rows that stay in fast memory."""
        return sum(table.cached_bytes for table in self.tables.values())


def row_order(loads: Mapping[str, TableLoad], optimizer: str) -> RowOrder:
    """Return the order of rows, where a cached row includes its optimizer state."""
    widths = [row_bytes(load.embedding_dim, optimizer) for load in loads.values()]
    return RowOrder(list(loads.values()), widths)

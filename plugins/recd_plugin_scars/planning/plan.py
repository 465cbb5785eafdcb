"""Plans of caches, and the section ``cache`` of a topology."""

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


#: Its name in a topology.
SECTION = "cache"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Of an iteration, however small its batch: an assumption, for a small model without a profiler.
_STEP_SECONDS = {"cpu": 5e-3, "cuda": 2e-3}


class CacheRates(BaseModel):
    """Seconds of a rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample_seconds: Seconds = Field(default=0.0, description="For a sample, whatever its rows.")
    step_seconds: Seconds = Field(description="For an iteration, however small its batch: tau.")
    byte_seconds: Seconds = Field(
        description="For a byte of a row that is fetched from the backing store and written back."
    )

    @classmethod
    def of_topology(cls, topology: topologies.TopologySpec) -> Self:
        """Return the bounds of the bandwidths, both ways, and an assumption for an iteration."""
        between = topology.hbm_to_ddr_bandwidth
        bandwidth = between if between is not None else topology.ddr_bandwidth / 2
        return cls(
            step_seconds=_STEP_SECONDS[topology.device],
            byte_seconds=2 / bandwidth,
        )

    def costs(self, ranks: int) -> StepCosts:
        """Return the costs of ``ranks`` together: an iteration takes the time of them all."""
        return StepCosts(self.sample_seconds, self.step_seconds * ranks, self.byte_seconds)


def measured_rates(topology: topologies.TopologySpec) -> CacheRates | None:
    """Return the rates of the section ``cache``, or None."""
    found = topology.sections.get(SECTION)
    assert found is None or isinstance(found, CacheRates), "the package declares it"
    return found


def rates_of(topology: topologies.TopologySpec) -> CacheRates:
    """Return the rates of the section ``cache``, or the bounds of the bandwidths."""
    return measured_rates(topology) or CacheRates.of_topology(topology)


#: Steps in which a row that is worth caching is read more than once, unless told otherwise.
STEPS = 10_000


@dataclass(frozen=True, eq=False)
class CachedTable:
    """The cache of one table.

    Attributes:
        cached: number of the most read rows that stay in the fast memory.
        useful: rows beyond which caching saves nothing worth having; None if unknown.
        traffic: of a step of all ranks.
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
    """The caches of some tables, for steps of ``batch_size`` samples of all ranks."""

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
        """Return a plan of given sizes; ``traffic`` describes the other arguments."""
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
        """Return the useful rows that save most traffic in ``num_bytes`` of fast memory.

        That is of all tables and ranks; None caches all useful rows: those that are read more than
        once in ``steps``. ``traffic`` describes the other arguments.
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
        """Bytes of all rows that stay in the fast memory."""
        return sum(table.cached_bytes for table in self.tables.values())


def row_order(loads: Mapping[str, TableLoad], optimizer: str) -> RowOrder:
    """Return the order of rows whose optimizer state is cached with them."""
    widths = [row_bytes(load.embedding_dim, optimizer) for load in loads.values()]
    return RowOrder(list(loads.values()), widths)

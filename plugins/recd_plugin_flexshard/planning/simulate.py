"""Simulates the bytes that ranks send with row copies, and with TorchRec's row-wise sharding.

Starts no ranks. Counts the ids of batches by tier (hot, flex, cold) and owner rank, and computes
the bytes from these counts. Bytes are defined as in ``CollectiveBytes``, which counts real runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import (
    ClusterShape,
    Collective,
    CollectiveSeconds,
    Floats,
    rows_sent,
)
from recd_plugin_flexshard.planning.plan import (
    ID_BYTES,
    LENGTH_BYTES,
    TIERS,
    TableTiers,
    Tier,
    TierPlan,
    cold_size_bytes,
    flex_size_bytes,
    traffic,
)
from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api import Prepared, Table

Counts = NDArray[np.int64]
_CHUNK = 1 << 22  # Rows processed at once, to bound memory.


class TableRoute:
    """Counts the ids of one table by location of row copies and by owner rank.

    Counts are int64 ``[2 + ranks_per_node, world_size]``. Along the first dimension are rows copied
    to every rank, rows copied to local rank 0, 1, ... of every node, and rows without copies. Along
    the second dimension are the ranks whose row-wise shard contains the row.
    """

    def __init__(
        self, tiers: TableTiers, cluster: ClusterShape, first_flex: int, coalesced: bool
    ) -> None:
        node = cluster.ranks_per_node
        self.coalesced, self.dim = coalesced, tiers.demand.embedding_dim
        self.shape = (2 + node, cluster.world_size)
        self._block = -(-tiers.demand.num_embeddings // cluster.world_size)
        rows = np.concatenate([tiers.hot_rows, tiers.flex_rows])
        order = np.argsort(rows)
        dealt = 1 + (first_flex + np.arange(tiers.flex)) % node
        lines = np.concatenate([np.zeros(tiers.hot, np.int64), dealt])
        # The last entry stands for ids above the last hot or flex row.
        self._sorted = np.append(rows[order], np.iinfo(np.int64).max)
        self._lines = np.append(lines[order], node + 1)

    def counts(self, ids: Counts, weights: Floats | None = None) -> Any:
        """Return the number of ``ids``, or the sum of ``weights``, by copy location and owner."""
        found = np.searchsorted(self._sorted, ids)
        lines = np.where(self._sorted[found] == ids, self._lines[found], self.shape[0] - 1)
        places = lines * self.shape[1] + ids // self._block
        size = self.shape[0] * self.shape[1]
        return np.bincount(places, weights, minlength=size).reshape(self.shape)


class StepLookups(NamedTuple):
    """Lookups of one rank in one step.

    Attributes:
        counts: ``TableRoute.counts`` of each table; counts distinct ids if rows are coalesced.
        length_bytes: bytes of the lengths to send, one per list, or one per feature if rows are
            coalesced.
    """

    counts: list[Counts]
    length_bytes: int


@dataclass(frozen=True, eq=False)
class PlayedTier:
    """Simulated traffic per step and rank for one tier: rows copied to ranks, to nodes, or not.

    Attributes:
        sent_integers: bytes of ids, lengths and tensor sizes, int64 ``[steps, world_size]``.
        sent_floats: bytes of embeddings and gradients, int64 ``[steps, world_size]``.
        seconds: seconds of the slowest rank, float64 ``[steps]``.
    """

    sent_integers: Counts
    sent_floats: Counts
    seconds: Floats

    @property
    def sent(self) -> Counts:
        return self.sent_integers + self.sent_floats


@dataclass(frozen=True, eq=False)
class PlayedSide:
    """Simulated traffic of one of two compared shardings: with row copies, or without.

    Attributes:
        tiers: traffic of rows copied to every rank, copied to every node, and not copied.
        lookups: number of ids that each rank looks up, int64 ``[steps, world_size]``.
    """

    tiers: Mapping[Tier, PlayedTier]
    lookups: Counts

    @property
    def sent(self) -> Counts:
        """Return the bytes that each rank sends in all-to-alls, int64 ``[steps, world_size]``."""
        return np.sum([self.tiers[t].sent for t in ("cold", "flex") if t in self.tiers], axis=0)

    @property
    def seconds(self) -> CollectiveSeconds:
        """Return the mean seconds per step of each collective."""
        order: tuple[Tier, ...] = ("cold", "flex", "hot", "flex_gradients")
        tiers = [self.tiers.get(name) for name in order]
        return CollectiveSeconds(*(float(t.seconds.mean()) if t else 0.0 for t in tiers))


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of ``simulate``: traffic with row copies and with TorchRec's row-wise sharding."""

    plan: TierPlan
    source: str
    steps: int
    tiered: PlayedSide
    row_wise: PlayedSide

    @property
    def a2a_reduction(self) -> float:
        """Return the fraction of bytes that row copies save in the all-to-all over all ranks."""
        stock, mine = (
            int(side.tiers["cold"].sent_floats.sum()) for side in (self.row_wise, self.tiered)
        )
        return 1 - mine / stock if stock else 0.0


def imbalance(by_rank: Counts) -> float:
    """Return the maximum of a quantity over ranks divided by its mean, averaged over steps.

    ``by_rank`` is int64 ``[steps, world_size]``.
    """
    means = by_rank.mean(1)
    ratios = by_rank.max(1)[means > 0] / means[means > 0]
    return float(ratios.mean()) if len(ratios) else 1.0


def simulate(plan: TierPlan, source: DrawnBatches | RegistryBatches, steps: int) -> Simulation:
    """Simulate ``steps`` batches of every rank, with all tables in one EmbeddingCollection.

    Args:
        plan: the cluster, and the rows of the tables to copy.
        source: batches to simulate.
        steps: number of batches per rank.
    """
    untiered = tuple(replace(table, hot=0, flex=0) for table in plan.tables)
    plain = replace(plan, tables=untiered, options=plan.options.plain)
    sides = (_play(each, source, steps, each is plain) for each in (plan, plain))
    return Simulation(plan, source.name, steps, *sides)


class _Exchange:
    """Counts the ids and scalars of an all-to-all in each group of ``size`` consecutive ranks.

    Ranks send ids to the owners of rows, and owners return the embeddings.

    Attributes:
        out: number of ids and scalars that each rank requests, int64 ``[2, steps, ranks]``.
        into: number of ids and scalars requested from each rank, int64 ``[2, steps, ranks]``.
        own: number of ids and scalars that each rank requests from itself, int64
            ``[2, steps, ranks]``.
    """

    def __init__(self, steps: int, ranks: int, size: int) -> None:
        self._size = size
        self.out, self.into, self.own = np.zeros((3, 2, steps, ranks), np.int64)

    def add(self, step: int, rank: int, wanted: Counts, dim: int) -> None:
        place = rank % self._size
        group = slice(rank - place, rank - place + self._size)
        for kind, times in enumerate((1, dim)):
            self.out[kind, step, rank] += times * wanted.sum()
            self.into[kind, step, group] += times * wanted
            self.own[kind, step, rank] += times * wanted[place]

    def tier(self, widths: tuple[float, float], by: Collective, sizes: Any) -> PlayedTier:
        """Return the bytes and seconds of the all-to-all.

        Args:
            widths: bytes per scalar in the forward and in the backward pass.
            by: speed of the all-to-all.
            sizes: bytes of tensor sizes and lengths, an int or int64 ``[steps, ranks]``.
        """
        forward, back = widths
        ids, out = self.out - self.own
        most = np.maximum(self.out[1], self.into[1]).max(1)
        sent = forward * (self.into - self.own)[1] + back * out
        return PlayedTier(
            ID_BYTES * ids + sizes,
            np.rint(sent).astype(np.int64),
            np.array([by.seconds_for(sum(widths) * float(each)) for each in most]),
        )


def _play(
    plan: TierPlan, source: DrawnBatches | RegistryBatches, steps: int, plain: bool
) -> PlayedSide:
    cluster, options = plan.cluster, plan.options
    ranks, node, by = cluster.world_size, cluster.ranks_per_node, cluster.collectives
    first, routes = 0, []
    for table in plan.tables:
        routes.append(TableRoute(table, cluster, first, options.coalesce))
        first += table.flex
    cold, flex = _Exchange(steps, ranks, ranks), _Exchange(steps, ranks, node)
    hot_ids, lengths = np.zeros((2, steps, ranks), np.int64)
    for rank in range(ranks):
        for step, lookups in enumerate(source.read(routes, rank, steps, plain)):
            lengths[step, rank] = lookups.length_bytes
            for route, counts in zip(routes, lookups.counts, strict=True):
                hot_ids[step, rank] += counts[0].sum()
                flex.add(step, rank, counts[1:-1].sum(1), route.dim)
                cold.add(step, rank, counts[-1], route.dim)
    wire, sizes = options.wire_bytes, cold_size_bytes(plan) + (ranks - 1) * lengths
    found = {"cold": cold.tier((wire, wire), by.a2a_global, sizes)}
    if first:
        found["flex"] = flex.tier((wire, wire), by.a2a_intra, flex_size_bytes(plan))
    for tier, predicted in traffic(plan).items():
        if tier in ("hot", "flex_gradients") and predicted.bytes:
            num_bytes = round(predicted.integer_bytes), round(predicted.float_bytes)
            integers, floats = (np.full((steps, ranks), each) for each in num_bytes)
            found[tier] = PlayedTier(integers, floats, np.full(steps, predicted.seconds))
    tiers = {tier: found[tier] for tier in TIERS if tier in found}
    return PlayedSide(tiers, cold.into[0] + flex.into[0] + hot_ids)


class DrawnBatches:
    """Generates random lookups from the access frequencies of the plan.

    Accesses to each row follow independent Poisson distributions. Generates only the number of
    accesses by tier and owner rank, not the individual ids.
    """

    name = "drawn from the planned access frequencies"

    def __init__(self, plan: TierPlan) -> None:
        self._batch_size, self._demands = plan.cluster.batch_size, plan.demands
        self._means: dict[bool, list[Floats]] = {}

    def read(
        self, routes: list[TableRoute], rank: int, steps: int, plain: bool
    ) -> Iterator[StepLookups]:
        """Yield lookups of ``steps`` random batches of a rank, deduplicated unless ``plain``."""
        coalesced = routes[0].coalesced
        if plain not in self._means:
            self._means[plain] = self._rates(routes, plain)
        lists = sum(
            d.features
            * (1 if coalesced else round(self._batch_size / (1 if plain else d.dedupe_factor)))
            for d in self._demands
        )
        for step in range(steps):
            random = np.random.default_rng([step, rank, plain])
            counts = [random.poisson(mean) for mean in self._means[plain]]
            yield StepLookups(counts, LENGTH_BYTES * lists)

    def _rates(self, routes: list[TableRoute], plain: bool) -> list[Floats]:
        """Return the mean rows sent per batch for each table, shaped like ``TableRoute.counts``."""
        found = []
        for route, demand in zip(routes, self._demands, strict=True):
            coalesced, factor = route.coalesced, 1.0 if plain else demand.dedupe_factor
            probabilities, repeats = demand.bins()
            size = demand.independent_rows(self._batch_size) if coalesced else self._batch_size
            rates = np.repeat(rows_sent(probabilities, size, factor, coalesced), repeats)
            ids = demand.ids(0, demand.num_embeddings)
            chunks = [slice(start, start + _CHUNK) for start in range(0, len(ids), _CHUNK)]
            found.append(np.sum([route.counts(ids[each], rates[each]) for each in chunks], axis=0))
        return found


class RegistryBatches:
    """Reads the lookups of the first batches of the training split.

    Uses the converter of the registry file, or a converter without deduplication for comparison.
    """

    def __init__(self, prepared: Prepared, tables: list[Table]) -> None:
        from recd_plugins.api import PlainConverter, row_pipelines

        registry = prepared.registry
        self.name = f"batches of {registry.path}"
        self._registry, self._dataset = registry, prepared.wrapped_dataset
        self._tables = tables
        plain = replace(registry, converter=PlainConverter(PlainConverter.Options()))
        self._pipelines = [
            row_pipelines.RowPipeline.of_model(each, prepared) for each in (registry, plain)
        ]

    def read(
        self, routes: list[TableRoute], rank: int, steps: int, plain: bool
    ) -> Iterator[StepLookups]:
        """Yield the lookups of a rank's first ``steps`` batches, deduplicated unless ``plain``."""
        world_size, batch_size = routes[0].shape[1], self._registry.training.batch_size
        reader = self._dataset.reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split="train"
        )
        if len(reader) < steps:
            raise DataError(
                f"{self._registry.path}: the training split has {len(reader)} batches for each of "
                f"{world_size:,} ranks, but --steps is {steps}. Lower --steps or --batch-size."
            )
        pipeline, coalesced = self._pipelines[plain], routes[0].coalesced
        num_features = sum(len(table.features) for table in self._tables)
        for rows in islice(pipeline.reading(reader), steps):
            kjt = next(iter(pipeline.read([rows]))).sequence_features
            assert kjt is not None, "the model looks the tables up as sequences"
            values = {name: jagged.values().numpy() for name, jagged in kjt.to_dict().items()}
            ids = [np.concatenate([values[name] for name in t.features]) for t in self._tables]
            lists = num_features * (1 if coalesced else kjt.stride())
            yield StepLookups(
                [
                    route.counts(np.unique(of_table) if coalesced else of_table)
                    for route, of_table in zip(routes, ids, strict=True)
                ],
                lists * kjt.lengths().element_size(),
            )

"""Batches to play through a plan: drawn by how often rows are accessed, or those of a registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from recd_plugin_flexshard.planning.costs import Floats, rows_sent
from recd_plugin_flexshard.planning.demand import TableDemand
from recd_plugin_flexshard.planning.plan import TierPlan
from recd_plugin_flexshard.planning.simulate import Counts, StepLookups, TableRoute
from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api import Prepared, RowPipeline, Rows, Table


class DrawnBatches:
    """Batches in which each row is accessed a Poisson number of times, independently of others.

    So is the sum over the rows of a place, and only these sums are drawn. Of a coalesced plan the
    rows of a place that a batch has are drawn from the binomial distribution with their mean and
    variance.
    """

    def __init__(
        self,
        plan: TierPlan,
        seed: int = 0,
        demands: Sequence[TableDemand] | None = None,
        name: str = "the accesses that were planned for",
    ) -> None:
        self.name = f"drawn from {name}, seed {seed}"
        self._batch_size = plan.cluster.batch_size
        self._seed = seed
        self._demands = demands or plan.demands
        self._rates: list[Floats] = []
        self._present: list[tuple[Counts, Floats]] = []

    def read(
        self, routes: list[TableRoute], rank: int, steps: int
    ) -> Iterator[tuple[StepLookups, StepLookups]]:
        """See ``simulate.BatchIds``."""
        if not self._rates:
            pairs = list(zip(routes, self._demands, strict=True))
            self._rates = [route.rates(demand) for route, demand in pairs]
            if routes[0].coalesced:
                self._present = [_binomial(*pair, self._batch_size) for pair in pairs]
        size = self._batch_size
        unique = [size / demand.dedupe_factor for demand in self._demands]
        for step in range(steps):
            random = np.random.default_rng([self._seed, step, rank])
            mine = self._drawn(random, unique)
            if self._present:
                mine = StepLookups(
                    [random.binomial(n, p) for n, p in self._present],
                    sum(demand.features for demand in self._demands),
                    ids=[int(counts.sum()) for counts in mine.counts],
                )
            yield mine, self._drawn(random, [size] * len(unique))

    def _drawn(self, random: np.random.Generator, rows: Sequence[float]) -> StepLookups:
        """Draw a batch with so many rows of each table."""
        features = [demand.features for demand in self._demands]
        return StepLookups(
            [random.poisson(rates * n) for rates, n in zip(self._rates, rows, strict=True)],
            sum(round(n * f) for n, f in zip(rows, features, strict=True)),
        )


def _binomial(route: TableRoute, demand: TableDemand, batch_size: int) -> tuple[Counts, Floats]:
    """Return trials and their probability, by place, for the rows that a batch has."""
    rows = demand.independent_rows(batch_size)

    def present(accesses: Floats) -> Floats:
        return rows_sent(accesses, rows, demand.dedupe_factor, coalesce=True)

    mean = route.rates(demand, present)
    squares = route.rates(demand, lambda accesses: present(accesses) ** 2)
    trials = np.ceil(np.divide(mean**2, squares, out=np.zeros_like(mean), where=squares > 0))
    p = np.divide(mean, trials, out=np.zeros_like(mean), where=trials > 0)
    return trials.astype(np.int64), np.clip(p, 0.0, 1.0)


class RegistryBatches:
    """The first batches of the training split, as the registry's converter gives them.

    Each rank reads its own share. The plain batches beside them have the same rows.
    """

    def __init__(self, prepared: Prepared, tables: list[Table]) -> None:
        from recd_plugins.api import PlainConverter, RowPipeline, fitted_transforms

        registry = prepared.registry
        self.name = f"batches of {registry.path}"
        self._registry, self._dataset = registry, prepared.wrapped_dataset
        self._tables = tables
        plain = replace(registry, converter=PlainConverter(PlainConverter.Options()))
        self._pipeline, self._plain = (
            RowPipeline(each, fitted_transforms(each, prepared)) for each in (registry, plain)
        )

    def read(
        self, routes: list[TableRoute], rank: int, steps: int
    ) -> Iterator[tuple[StepLookups, StepLookups]]:
        """See ``simulate.BatchIds``."""
        world_size, batch_size = routes[0].shape[1], self._registry.training.batch_size
        reader = self._dataset.reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split="train"
        )
        if len(reader) < steps:
            raise DataError(
                f"{self._registry.path}: on {world_size:,} ranks the training split has "
                f"{len(reader)} batches of {batch_size} rows for each, and {steps} steps are asked "
                "for; play fewer steps or smaller batches"
            )
        for rows in islice(self._pipeline.reading(reader), steps):
            yield (
                self._lookups(self._pipeline, routes, rows, routes[0].coalesced),
                self._lookups(self._plain, routes, rows, False),
            )

    def _lookups(
        self, pipeline: RowPipeline, routes: list[TableRoute], rows: Rows, coalesced: bool
    ) -> StepLookups:
        kjt = next(iter(pipeline.read([rows]))).sequence_features
        assert kjt is not None, "the model looks the tables up as sequences"
        values = {name: jagged.values().numpy() for name, jagged in kjt.to_dict().items()}
        ids = [np.concatenate([values[name] for name in table.features]) for table in self._tables]
        num_features = sum(len(table.features) for table in self._tables)
        return StepLookups(
            [
                route.counts(np.unique(of_table) if coalesced else of_table)
                for route, of_table in zip(routes, ids, strict=True)
            ],
            num_features if coalesced else kjt.stride() * num_features,
            kjt.lengths().element_size(),
            [len(of_table) for of_table in ids] if coalesced else None,
        )

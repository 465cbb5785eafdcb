"""Counts of how often training looks up each row of the embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import RunConfig
from recd_plugins.config.run_config import NoDataset
from recd_plugins.data.arrow import sparse_column
from recd_plugins.data.checks import check_ids
from recd_plugins.data.prepared import RegistryLookups, read_first_rows
from recd_plugins.data.preprocess import Preprocess, fitted_steps
from recd_plugins.data.row_pipeline import RowPipeline, fit_converter, lower
from recd_plugins.data.rows import training_rows
from recd_plugins.interfaces import Dataset, Table
from recd_plugins.interfaces.access import AccessProfile, TableCounter
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.interfaces.model_tables import rows_by_feature
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse.from_columns import kjt_from_columns

#: Default number of distinct rows, of all tables together, that are counted exactly.
EXACT_ROWS = 1 << 25
_LEAST_BOUND = 1 << 16


def measure_access(
    registry: RunConfig,
    tables: Sequence[Table],
    *,
    rows: int | None = None,
    bound: int | None = None,
    deduplicated: bool = True,
    progress: Callable[[int], None] | None = None,
) -> AccessProfile:
    """Count how often the training split looks up each row of ``tables``, after preprocessing.

    The data is streamed, and every process gets the same result.

    Args:
        registry: config with dataset, converter, preprocessing and batch size.
        tables: embedding tables. Ids of all features of a table are added up.
        rows: number of training rows to read, rounded up to batches; None reads all.
        bound: maximum number of distinct ids that are counted exactly per table. Above it, counts
            come from an approximate sketch. Default: 2**25 divided by the number of tables.
        deduplicated: whether to count only unique rows of a batch, for tables with deduplicated
            features.
        progress: called with the number of data rows of each batch.

    Raises:
        DataError: the data is missing or wrong, has no rows or lacks a feature, or an id is outside
            its table.
    """
    if bound is None:
        bound = max(_LEAST_BOUND, EXACT_ROWS // max(1, len(tables)))
    counters = {table.name: TableCounter(bound) for table in tables}
    every_row = dict.fromkeys(counters, 0)
    shared: set[str] = set()
    if deduplicated:
        fit_converter(registry)
        features = registry.converter.dedupe_factors().keys()
        shared = {table.name for table in tables if not features.isdisjoint(table.features)}
    samples = 0
    for reads in table_reads(registry, tables, rows, deduplicated=bool(shared)):
        for name, ids in reads.ids.items():
            for of_feature in ids:
                counters[name].add(of_feature)
            every_row[name] += reads.every_row[name]
        samples += reads.samples
        if progress is not None:
            progress(reads.samples)
    if not samples:
        raise DataError(
            f"{registry.path}: the training split has no rows to profile. Check dataset.options"
        )
    found = {}
    for table in tables:
        access = counters[table.name].access(
            table.name,
            table.features,
            table.num_embeddings,
            samples,
            maps_ids=_maps_ids(registry, table),
        )
        if table.name in shared:
            batch_size = registry.training.batch_size
            access = access.of_unique_rows(batch_size, every_row[table.name])
        found[table.name] = access
    first = "the first " if rows is not None and rows <= samples else ""
    return AccessProfile(found, f"{first}{samples:,} rows of {registry.path}")


Counts = NDArray[np.int64]

# A process may build a model several times from one dataset.
_known: WeakKeyDictionary[Dataset, dict[Any, Counts]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Reads:
    """Ids that one batch of ``samples`` rows looks up in each table.

    ``ids`` maps the table name to the ids of each of its features, int64 ``[num_ids]``.
    ``every_row`` maps it to the number of ids before deduplication.
    """

    samples: int
    ids: dict[str, list[NDArray[np.int64]]]
    every_row: dict[str, int]


def table_reads(
    registry: RunConfig, tables: Sequence[Table], rows: int | None, *, deduplicated: bool
) -> Iterator[Reads]:
    """Yield the ids that each batch looks up, for the first ``rows`` training rows (None: all)."""
    num_embeddings = rows_by_feature(table for table in tables if not _maps_ids(registry, table))
    placement = Placement(pooled=_features(tables, True), sequence=_features(tables, False))
    batches: Iterator[Batch]
    if deduplicated:
        pipeline = RowPipeline(registry, placement, num_embeddings)
        dataset = read_first_rows(registry).dataset if registry.wrappers else registry.dataset
        size = registry.training.batch_size
        batches = map(pipeline.batch, pipeline.reading(dataset.sample(size)))
    else:
        features = (*placement.pooled, *placement.sequence)
        batches = _stored(registry, features, num_embeddings, rows)
    samples = 0
    for batch in batches:
        lowered = lower(batch, placement)
        pooled, sequences = _ids(lowered.sparse_features), _ids(lowered.sequence_features)
        every_row = _ids_of_every_row(batch)
        yield Reads(
            batch.batch_size,
            {
                table.name: [(pooled if table.pooled else sequences)[f] for f in table.features]
                for table in tables
            },
            {table.name: sum(every_row[f] for f in table.features) for table in tables},
        )
        samples += batch.batch_size
        if rows is not None and samples >= rows:
            return


def _maps_ids(registry: RunConfig, table: Table) -> bool:
    return any(each.plugin.maps_ids and each.matches(table.name) for each in registry.sharding)


def _stored(
    registry: RunConfig,
    features: Sequence[str],
    num_embeddings: Mapping[str, int],
    rows: int | None,
) -> Iterator[Batch]:
    preprocess = Preprocess(fitted_steps(registry, registry.dataset.schema()))
    for read in training_rows(registry, rows):
        columns = {name: sparse_column(read, name) for name in features}
        nothing = torch.empty(len(read), 0)
        batch = preprocess(Batch(nothing, nothing.sum(1), kjt_from_columns(columns, len(read))))
        check_ids(batch, num_embeddings, read, preprocess.made_by)
        yield batch


def _features(tables: Sequence[Table], pooled: bool) -> tuple[str, ...]:
    chosen = (f for table in tables if table.pooled == pooled for f in table.features)
    return tuple(dict.fromkeys(chosen))


def _ids(kjt: KeyedJaggedTensor | None) -> dict[str, NDArray[np.int64]]:
    jagged = {} if kjt is None else kjt.to_dict()
    return {name: each.values().numpy() for name, each in jagged.items()}


def _ids_of_every_row(batch: Batch) -> dict[str, int]:
    counts: dict[str, int] = {}
    if batch.kjt is not None:
        counts.update(zip(batch.kjt.keys(), batch.kjt.length_per_key(), strict=True))
    for ikjt in batch.ikjts:
        lengths = ikjt.lengths().view(len(ikjt.keys()), -1)
        by_key = lengths.index_select(1, ikjt.inverse_lookup().long()).sum(1)
        counts.update(zip(ikjt.keys(), by_key.tolist(), strict=True))
    for partial in batch.partials:
        counts.update((name, int(lengths.sum())) for name, _, _, lengths in partial.split())
    return counts


def positive_counts(registry: RunConfig, feature: str, num_embeddings: int) -> Counts:
    """Count the training rows with label 1 that contain each id, int64 ``[num_embeddings]``.

    Reads the whole training split once per process, and counts ids after preprocessing. Ids outside
    the table are ignored. Without a dataset, all counts are 0, because a checkpoint contains the
    counts.
    """
    if isinstance(registry.dataset, NoDataset):
        return np.zeros(num_embeddings, np.int64)
    known = _known.setdefault(registry.dataset, {})
    key = feature, num_embeddings, registry.path
    if key not in known:
        counts = np.zeros(num_embeddings, np.int64)
        lookups, label = RegistryLookups(registry), registry.dataset.schema().label
        with torch.device("cpu"):  # models may be built on the meta device
            for rows in training_rows(registry, None):
                found = lookups.of(rows, [feature])[feature]
                positive = rows.data.column(label).to_numpy(zero_copy_only=False) > 0.5
                num_lists = len(found.offsets) - 1
                lists = np.arange(num_lists) if found.inverse is None else found.inverse
                of_list = np.bincount(lists[positive], minlength=num_lists)
                times = np.repeat(of_list, np.diff(found.offsets))
                there = (found.ids >= 0) & (found.ids < num_embeddings)
                np.add.at(counts, found.ids[there], times[there])
        known[key] = counts
    return known[key]

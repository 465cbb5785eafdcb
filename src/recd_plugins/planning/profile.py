"""Measures the data profile for the planner: lengths, dedupe factors and distinct ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.config import RunConfig
from recd_plugins.config.run_config import NoDataset
from recd_plugins.data.access import table_reads
from recd_plugins.data.prepared import FirstRows, read_first_rows
from recd_plugins.data.row_pipeline import RowPipeline, fit_converter
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds, FeatureProfile
from recd_plugins.sparse.index_select import jagged_index_select

_Ids = NDArray[np.int64]
# A single small batch may have few sessions.
_LEAST_ROWS, _MOST_BATCHES = 4096, 64
# Hundreds of columns take more time, so read fewer batches.
_MOST_COLUMNS, _FEW_BATCHES = 16_384, 8
# Batches are halved and joined to measure how distinct ids grow with the batch size.
_HALVINGS, _BATCHES, _TOGETHER = 4, 32, (1, 2, 4)


def measure_profile(
    registry: RunConfig,
    *,
    num_embeddings: Mapping[str, int] | None = None,
    coalesced: Sequence[Table] = (),
    others: Sequence[Table] = (),
    least_rows: int = _LEAST_ROWS,
) -> DataProfile:
    """Measure the mean profile of the first training batches after conversion and preprocessing.

    Args:
        registry: run config with dataset, converter and preprocessing.
        num_embeddings: rows of each feature's table, to check ids.
        coalesced: tables whose ids are deduplicated before they are sent.
        others: further tables whose distinct ids are counted.
        least_rows: rows to read; at most 64 batches, or 8 for data with thousands of columns.

    Raises:
        DataError: the data is missing or invalid.
        RegistryError: a pattern matches no feature.
    """
    if isinstance(registry.dataset, NoDataset):
        return DataProfile({}, "no data: one id a row, as TorchRec assumes")
    first = read_first_rows(registry)
    rows = first.rows
    fit_converter(registry, rows)
    pipeline = RowPipeline(registry, Placement(), num_embeddings or {})
    batch = pipeline.batch(rows)
    most = max(_FEW_BATCHES, min(_MOST_BATCHES, _MOST_COLUMNS // rows.data.num_columns))
    count = min(-(-least_rows // len(rows)), most)
    looked_at = [rows, *first.batches(count)]
    batches = [batch, *map(pipeline.batch, looked_at[1:])]
    tables = list({table.name: table for table in (*coalesced, *others)}.values())
    read = measure_reads(batches, tables)
    distinct = {table.name: read[table.name] for table in coalesced}
    features = _mean([dict(_features(each)) for each in batches])
    source = f"the first {sum(map(len, looked_at)):,} rows{_left_out(registry, first)}"
    return DataProfile(features, source, distinct, read)


def _mean(batches: Sequence[dict[str, FeatureProfile]]) -> dict[str, FeatureProfile]:
    def mean(name: str) -> FeatureProfile:
        of_batches = [each[name] for each in batches if name in each]
        if len(of_batches) == 1:
            return of_batches[0]
        length = fmean(each.length for each in of_batches)
        ids = length or 1.0
        return replace(
            of_batches[0],
            length=length,
            repeated_rows=fmean(each.repeated_rows for each in of_batches),
            repeated_ids=fmean(each.length * each.repeated_ids for each in of_batches) / ids,
            shared_ids=fmean(each.length * each.shared_ids for each in of_batches) / ids,
        )

    return {name: mean(name) for name in batches[0]}


def _left_out(registry: RunConfig, first: FirstRows) -> str:
    """Return text that names dataset wrappers that the measurement skipped; "" for none."""
    names = (f"{e.plugin.name} ({registry.path}:{e.line} {e.field})" for e in first.left_out)
    if not first.left_out:
        return ""
    return f", measured without {' and '.join(names)}, so dedupe factors in training may differ"


def _features(batch: Batch) -> Iterator[tuple[str, FeatureProfile]]:
    size = batch.batch_size
    if batch.kjt is not None:
        for name, jagged in batch.kjt.to_dict().items():
            yield name, FeatureProfile(jagged.values().numel() / size)
    for ikjt in batch.ikjts:
        counts = torch.bincount(ikjt.inverse_lookup().long(), minlength=ikjt.num_unique())
        for name, jagged in ikjt.to_unique_kjt().to_dict().items():
            yield (
                name,
                _deduplicated(
                    size,
                    ids=int((jagged.lengths() * counts).sum()),
                    rows=ikjt.num_unique(),
                    unique=int(jagged.lengths().sum()),
                ),
            )
    for partial in batch.partials:
        alone = [[key] for key in partial.keys()]  # noqa: SIM118
        exact = {ikjt.keys()[0]: ikjt for ikjt in partial.to_ikjt(alone)}
        for name, values, _, lengths in partial.split():
            yield (
                name,
                _deduplicated(
                    size,
                    ids=int(lengths.sum()),
                    rows=exact[name].num_unique(),
                    unique=exact[name].values().numel(),
                    stored=values.numel(),
                ),
            )


def _deduplicated(
    batch_size: int, *, ids: int, rows: int, unique: int, stored: int | None = None
) -> FeatureProfile:
    repeated = _share(batch_size, ids, unique)
    return FeatureProfile(
        length=ids / batch_size,
        deduplicated=True,
        repeated_rows=_share(batch_size, batch_size, rows),
        repeated_ids=repeated,
        shared_ids=repeated if stored is None else _share(batch_size, ids, stored),
    )


def _share(batch_size: int, whole: int, kept: int) -> float:
    """Return the fraction of rows or ids that deduplication removed; ``kept`` of ``whole`` remain.

    Excludes the first of ``batch_size`` rows, which is never a duplicate.
    """
    if not whole or batch_size == 1:
        return 0.0
    return min(1.0, (1 - kept / whole) * batch_size / (batch_size - 1))


def measure_reads(batches: Sequence[Batch], tables: Sequence[Table]) -> dict[str, DistinctIds]:
    """Return a dict from table to its mean number of distinct ids at several batch sizes."""
    if not tables:
        return {}
    num_rows = batches[0].batch_size
    sizes = sorted({max(1, num_rows >> halvings) for halvings in range(_HALVINGS + 1)})
    of_rows = _every_row(batches[0])
    whole = [_ids(batch) for batch in batches]
    found = {}
    for table in tables:
        rows = [of_rows[name] for name in table.features if name in of_rows]
        in_first = [fmean(_distinct_in_parts(rows, num_rows, size)) for size in sizes]
        of_whole = fmean(len(_distinct([_of_table(ids, table)])) for ids in whole)
        if in_first[-1]:
            grown = tuple(of_whole / in_first[-1] * ids for ids in in_first)
            found[table.name] = DistinctIds(tuple(sizes), grown)
        else:
            found[table.name] = DistinctIds((num_rows,), (of_whole,))
    return found


def distinct_reads(registry: RunConfig, tables: Sequence[Table]) -> dict[str, DistinctIds]:
    """Return a dict from table to its mean number of distinct ids in 1 to 4 joined batches."""
    if isinstance(registry.dataset, NoDataset):
        return {}
    size = registry.training.batch_size
    found: dict[str, list[_Ids]] = {table.name: [] for table in tables}
    for reads in islice(table_reads(registry, tables, None, deduplicated=True), _BATCHES):
        for name, ids in reads.ids.items():
            found[name].append(_distinct(ids))

    def mean(batches: Sequence[_Ids], count: int) -> float:
        starts = range(0, len(batches) - count + 1, count)
        return fmean(len(_distinct(batches[start : start + count])) for start in starts)

    counts = {name: [n for n in _TOGETHER if len(each) >= n] for name, each in found.items()}
    return {
        name: DistinctIds(
            tuple(size * n for n in counts[name]), tuple(mean(each, n) for n in counts[name])
        )
        for name, each in found.items()
    }


def _distinct_in_parts(
    features: Sequence[tuple[_Ids, _Ids]], num_rows: int, size: int
) -> list[int]:
    """Return the number of distinct ids in each consecutive batch of ``size`` rows."""
    starts = range(0, num_rows - size + 1, size) if features else ()
    return [
        len(_distinct([ids[at[start] : at[start + size]] for ids, at in features]))
        for start in starts
    ] or [0]


def _every_row(batch: Batch) -> dict[str, tuple[_Ids, _Ids]]:
    """Return a dict from feature to (ids, offsets) of all rows, including duplicate rows."""
    found = {} if batch.kjt is None else batch.kjt.to_dict()
    exact = [
        ikjt
        for partial in batch.partials
        for ikjt in partial.to_ikjt([[key] for key in partial.keys()])  # noqa: SIM118
    ]
    for ikjt in (*batch.ikjts, *exact):
        inverse = ikjt.inverse_lookup().long()
        for name, jagged in ikjt.to_unique_kjt().to_dict().items():
            found[name] = jagged_index_select(jagged, inverse)
    return {name: (j.values().numpy(), j.offsets().numpy()) for name, j in found.items()}


def _ids(batch: Batch) -> dict[str, Tensor]:
    """Return a dict from feature to the ids that the batch stores after deduplication."""
    found = {} if batch.kjt is None else {n: j.values() for n, j in batch.kjt.to_dict().items()}
    for ikjt in batch.ikjts:
        found |= {n: j.values() for n, j in ikjt.to_unique_kjt().to_dict().items()}
    for partial in batch.partials:
        found |= {name: values for name, values, _, _ in partial.split()}
    return found


def _of_table(ids: dict[str, Tensor], table: Table) -> _Ids:
    given = [ids[name].numpy() for name in table.features if name in ids]
    return np.concatenate([np.empty(0, np.int64), *given])


def _distinct(parts: Sequence[_Ids]) -> _Ids:
    """Return the sorted distinct ids; ten times faster than ``np.unique``."""
    ids = np.sort(np.concatenate(parts))
    first = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]

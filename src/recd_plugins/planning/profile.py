"""Data profile for the planner: lengths, deduplication, distinct ids and gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.config import Entry, RunConfig
from recd_plugins.config.run_config import NoDataset
from recd_plugins.data.access import table_reads
from recd_plugins.data.prepared import FirstRows, read_first_rows
from recd_plugins.data.row_pipeline import RowPipeline, Transforms, fit_converter
from recd_plugins.interfaces import PlanContext, Table
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.interfaces.data_profile import (
    DataProfile,
    DistinctGradients,
    DistinctIds,
    FeatureProfile,
)
from recd_plugins.interfaces.step_cost import StageCosts
from recd_plugins.sharding.gradient_dedup import all_are_sent
from recd_plugins.sparse.index_select import jagged_index_select

_Ids = NDArray[np.int64]
# One random number per row. The sum over its rows identifies a gradient.
_Marks = NDArray[np.uint64]
# A single small batch may have few sessions.
_LEAST_ROWS, _MOST_BATCHES = 4096, 64
# Hundreds of columns take more time, so read fewer batches.
_MOST_COLUMNS, _FEW_BATCHES = 16_384, 8
# Batches are halved and joined to measure how distinct ids grow with the batch size.
_HALVINGS, _BATCHES, _TOGETHER = 4, 32, (1, 2, 4)
# Compute seconds per byte saved by gradient deduplication; equals links of 1 Gbit/s.
_SECONDS_TO_SPARE_A_BYTE = 1e-8
# Number of ids, in whole batches, in which equal gradients are counted.
_MOST_IDS = 200_000
_OWNERS, _KEPT = (1, 2, 4, 8, 32, 128), (0.1, 0.25, 0.5, 0.75, 1.0)


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
        registry: dataset, converter and preprocessing.
        num_embeddings: rows of the table of each feature, to check ids.
        coalesced: tables whose ids are deduplicated before they are sent.
        others: further tables whose distinct rows are counted.
        least_rows: rows to read; at most 64 batches, or 8 with thousands of columns.

    Raises:
        DataError: the data is missing or wrong.
        RegistryError: a pattern matches no feature.
    """
    if isinstance(registry.dataset, NoDataset):
        return DataProfile({}, "no data: one id a row, as TorchRec assumes")
    first = read_first_rows(registry)
    rows = first.rows
    fit_converter(registry, rows)
    pipeline = RowPipeline(registry, Transforms.of(registry, Placement(), num_embeddings))
    batch = pipeline.batch(rows)
    most = max(_FEW_BATCHES, min(_MOST_BATCHES, _MOST_COLUMNS // rows.data.num_columns))
    count = min(-(-least_rows // len(rows)), most)
    looked_at = [rows, *first.batches(count)]
    batches = [batch, *map(pipeline.batch, looked_at[1:])]
    tables = list({table.name: table for table in (*coalesced, *others)}.values())
    read = measure_reads(batches, tables)
    distinct = {table.name: read[table.name] for table in coalesced}
    alike = pooled_alike(registry) & set(num_embeddings or ())
    gradients = measure_gradients(batches, tables, alike)
    features = _mean([dict(_features(each)) for each in batches])
    source = f"the first {sum(map(len, looked_at)):,} rows{_order(registry, first)}"
    return DataProfile(features, source, distinct, read, gradients)


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


def _order(registry: RunConfig, first: FirstRows) -> str:
    """Describe the wrappers that order the rows, and those that were skipped."""
    used = registry.wrappers[: len(registry.wrappers) - len(first.left_out)]

    def names(entries: Iterable[Entry[Any]]) -> str:
        places = (f"{e.plugin.name} ({registry.path}:{e.line} {e.field})" for e in entries)
        return " and ".join(places)

    ordered = f", in the order of {names(used)}" if used else ""
    if first.left_out:
        ordered += f", without {names(first.left_out)}: dedupe factors of training may differ"
    return ordered


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
    """Return the probability that a later row is not stored, if ``kept`` of ``whole`` rows are."""
    if not whole or batch_size == 1:
        return 0.0
    return min(1.0, (1 - kept / whole) * batch_size / (batch_size - 1))


def measure_reads(batches: Sequence[Batch], tables: Sequence[Table]) -> dict[str, DistinctIds]:
    """Return mean distinct ids for a batch and for smaller batch sizes, keyed by table."""
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
    """Return mean distinct ids sent, keyed by table, for one to four joined batches."""
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
    """Count distinct ids in batches of ``size`` rows."""
    starts = range(0, num_rows - size + 1, size) if features else ()
    return [
        len(_distinct([ids[at[start] : at[start + size]] for ids, at in features]))
        for start in starts
    ] or [0]


def _every_row(batch: Batch) -> dict[str, tuple[_Ids, _Ids]]:
    """Return ids and offsets of all rows, keyed by feature."""
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
    """Return stored ids, keyed by feature."""
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
    """Return sorted unique ids, ten times faster than ``np.unique``."""
    ids = np.sort(np.concatenate(parts))
    first = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids[first]


def gradient_dedup_pays(costs: StageCosts | None) -> bool:
    """Return whether gradient deduplication saves time; True without ``costs``."""
    return costs is None or costs.all_to_all.bytes_across_nodes >= _SECONDS_TO_SPARE_A_BYTE


def as_run_sends(profile: DataProfile, costs: StageCosts | None) -> DataProfile:
    """Return the profile, without distinct gradients if a run does not deduplicate them."""
    return profile if gradient_dedup_pays(costs) else replace(profile, gradients={})


def gradients_sent_once(context: PlanContext) -> Mapping[str, DistinctGradients]:
    """Return distinct gradients of the tables for which a run deduplicates them."""
    # int8 already sends fewer bytes than 16-bit scalars.
    by_gloo, int8 = context.device_type == "cpu", context.wire_bytes < 2
    if not by_gloo or int8 or context.nodes == 1 or all_are_sent():
        return {}
    costs = context.costs if context.measured else None
    return as_run_sends(context.data.profile(), costs).gradients


def pooled_alike(registry: RunConfig) -> set[str]:
    """Return the features whose pooling gives all rows of a sequence the same gradient."""
    alike = set()
    for feature in registry.dataset.schema().sparse:
        plugins = [entry.plugin for entry in registry.pooling if entry.matches(feature)]
        if plugins and plugins[0].gradient_dedup:
            alike.add(feature)
    return alike


def measure_gradients(
    batches: Sequence[Batch], tables: Sequence[Table], alike: Collection[str]
) -> dict[str, DistinctGradients]:
    """Measure the share of distinct gradients, keyed by table name.

    Args:
        batches: batches of equal size.
        tables: tables to measure; only sequence tables with all features in ``alike`` count.
        alike: features whose pooling gives all rows of a sequence the same gradient.
    """
    chosen = [t for t in tables if not t.pooled and t.features and set(t.features) <= set(alike)]
    read = [{name: pair for name, *pair in _marked(batch)} for batch in batches if chosen]
    found = {}
    for table in chosen:
        of_batches = [
            (np.concatenate(ids), np.concatenate(marks))
            for each in read
            if (parts := [each[name] for name in table.features if name in each])
            for ids, marks in [zip(*parts, strict=True)]
        ]
        if not any(len(ids) for ids, _ in of_batches):
            continue
        num_ids = accumulate((len(ids) for ids, _ in of_batches), initial=0)
        counted = [each for each, n in zip(of_batches, num_ids, strict=False) if n < _MOST_IDS]
        # The rows that are read, ascending, and their rank by frequency.
        rows, counts = np.unique(np.concatenate([i for i, _ in of_batches]), return_counts=True)
        places = np.empty(len(rows), np.int64)
        places[np.argsort(counts, kind="stable")] = np.arange(len(rows))
        coalesced, plain = (
            _shares(each, (rows, places), table.num_embeddings)
            for each in ([_summed(*pair) for pair in counted], counted)
        )
        found[table.name] = DistinctGradients(_OWNERS, _KEPT, coalesced, plain)
    return found


def _marked(batch: Batch) -> Iterator[tuple[str, _Ids, _Marks]]:
    """Yield feature, stored ids, and for each id the sum of its row marks."""
    jagged = {} if batch.kjt is None else batch.kjt.to_dict()
    for ikjt in batch.ikjts:
        jagged |= ikjt.to_unique_kjt().to_dict()
    for name, rows in jagged.items():
        lengths = rows.lengths().numpy()
        yield name, rows.values().numpy(), np.repeat(_marks(name, len(lengths)), lengths)
    for partial in batch.partials:
        for name, values, offsets, lengths in partial.split():
            starts, marks = offsets.numpy().astype(np.int64), _marks(name, len(offsets))
            change = np.zeros(len(values) + 1, np.uint64)
            np.add.at(change, starts, marks)
            np.subtract.at(change, starts + lengths.numpy(), marks)
            yield name, values.numpy(), np.cumsum(change)[:-1]


def _marks(feature: str, num_rows: int) -> _Marks:
    drawn = np.random.default_rng(list(feature.encode()))
    return drawn.integers(1 << 63, size=num_rows, dtype=np.uint64)


def _summed(ids: _Ids, marks: _Marks) -> tuple[_Ids, _Marks]:
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    first = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else order
    return ids[first], np.add.reduceat(marks[order], first) if len(ids) else marks


def _shares(
    batches: Sequence[tuple[_Ids, _Marks]], order: tuple[_Ids, _Ids], num_rows: int
) -> tuple[tuple[float, ...], ...]:
    """Return shares of distinct gradients, keyed by share of ids kept and number of owners."""
    ids = np.concatenate([ids for ids, _ in batches])
    batch = np.repeat(np.arange(len(batches)), [len(ids) for ids, _ in batches])
    marks = np.concatenate([marks for _, marks in batches])
    places = order[1][np.searchsorted(order[0], ids)]
    shares = []
    for kept in _KEPT:
        chosen = places <= np.quantile(places, kept) if len(ids) else places > 0
        owned = (batch[chosen] * owners + ids[chosen] * owners // num_rows for owners in _OWNERS)
        shares.append(tuple(_distinct_share(marks[chosen], each) for each in owned))
    return tuple(shares)


def _distinct_share(marks: _Marks, places: _Ids) -> float:
    if not len(marks):
        return 1.0
    order = np.lexsort((marks, places))
    marks, places = marks[order], places[order]
    differs = (marks[1:] != marks[:-1]) | (places[1:] != places[:-1])
    return (1 + int(differs.sum())) / len(marks)

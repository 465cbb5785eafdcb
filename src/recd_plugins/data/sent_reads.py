"""The reads of batches as their converter hands them on: of unique rows, where it deduplicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.first_rows import dataset_in_order
from recd_plugins.data.lower import lower
from recd_plugins.data.row_pipeline import RowPipeline, fit_converter
from recd_plugins.data.transforms import Transforms
from recd_plugins.interfaces import Table
from recd_plugins.model_tables import rows_by_feature
from recd_plugins.registry import RunConfig
from recd_plugins.values.batch import Batch
from recd_plugins.values.model_input import Placement


@dataclass(frozen=True)
class Reads:
    """What the tables are asked for by one batch.

    Attributes:
        samples: rows of the batch.
        ids: by table, those of its features one after the other: int64 ``[num_ids]`` each.
        every_row: by table, how many ids all rows have, before deduplication.
    """

    samples: int
    ids: dict[str, list[NDArray[np.int64]]]
    every_row: dict[str, int]


def deduplicated_tables(registry: RunConfig, tables: Sequence[Table]) -> set[str]:
    """The names of those of which the converter deduplicates a feature."""
    fit_converter(registry)
    features = registry.converter.dedupe_factors().keys()
    return {table.name for table in tables if not features.isdisjoint(table.features)}


def sent_reads(registry: RunConfig, tables: Sequence[Table], rows: int | None) -> Iterator[Reads]:
    """The reads of the training split's whole batches, as the reader of a single rank cuts them.

    A sequence is looked up as ``lower`` puts it into the KJT of sequences, a pooled feature as it
    puts it into that of pooled ones.

    Args:
        registry: its batch size is that of a rank.
        tables: with their features, which the data has.
        rows: no more batches than hold so many; None: all.
    """
    fit_converter(registry)
    placement = Placement(pooled=_features(tables, True), sequence=_features(tables, False))
    transforms = Transforms.of(registry, placement, rows_by_feature(tables))
    pipeline = RowPipeline(registry, transforms)
    samples = 0
    dataset = dataset_in_order(registry)
    for batch_rows in pipeline.reading(
        dataset.reader(rank=0, world_size=1, batch_size=registry.training.batch_size, split="train")
    ):
        batch = pipeline.batch(batch_rows)
        lowered = lower(batch, placement)
        pooled, sequences = _ids(lowered.sparse_features), _ids(lowered.sequence_features)
        every_row = _ids_of_every_row(batch)
        yield Reads(
            len(batch_rows),
            {
                table.name: [(pooled if table.pooled else sequences)[f] for f in table.features]
                for table in tables
            },
            {table.name: sum(every_row[f] for f in table.features) for table in tables},
        )
        samples += len(batch_rows)
        if rows is not None and samples >= rows:
            return


def _features(tables: Sequence[Table], pooled: bool) -> tuple[str, ...]:
    """Of tables of a kind, each once."""
    chosen = (f for table in tables if table.pooled == pooled for f in table.features)
    return tuple(dict.fromkeys(chosen))


def _ids(kjt: KeyedJaggedTensor | None) -> dict[str, NDArray[np.int64]]:
    if kjt is None:
        return {}
    values = kjt.values().split(kjt.length_per_key())
    return {name: ids.numpy() for name, ids in zip(kjt.keys(), values, strict=True)}


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

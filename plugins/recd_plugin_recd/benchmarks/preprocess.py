"""What preprocessing gains from deduplication, against what there is to gain: the DedupeFactor.

The same steps run on all rows and on the unique rows of the same batches, one batch after the other
as in a job that has one side only, and the sides in turn. Both make new tensors, in memory that was
freed before: fresh memory costs page faults, which fall on the larger side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recd_plugin_recd.benchmarks.batches import BATCH_SIZE, SCHEMA, papercal_batches
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugin_recd.kjt import KjtConverter
from recd_plugin_recd.preprocessing import Bucketize, FirstX, NGram, SigridHash
from recd_plugins.api import Preprocessing
from recd_plugins.api.batches import Batch, Preprocess
from recd_plugins.testing.benchmark import Figure, Size, keep_freed_memory, processor_seconds

SUMMARY = "speed-up of preprocessing by deduplication, over the DedupeFactor of the batch"

_TURNS = 5
_NUM_BORDERS = 63  # over all ids, which are hashes of 63 bits


def _num_batches(size: Size) -> int:
    return {"tiny": 1, "small": 2, "reference": 8}[size]


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL clustered by session, {_num_batches(size)} batches of {BATCH_SIZE} rows, one "
        "step over every sparse feature, processor time of one thread"
    )


def run(size: Size) -> list[Figure]:
    """Measure: the speed-up of a step over the DedupeFactor, and its time an id."""
    keep_freed_memory()
    pairs = _pairs(_num_batches(size))
    borders = [index << 57 for index in range(1, _NUM_BORDERS + 1)]
    return [
        *_figures("hash", _made(SigridHash, {"buckets": 100_000}), pairs, goal=0.95),
        *_figures("bucketize", _made(Bucketize, {"borders": borders}), pairs, goal=0.55),
        *_figures("first_x", _made(FirstX, {"x": 20}), pairs),
        *_figures("ngram", _made(NGram, {"n": 2}), pairs),
        Figure.of(
            "dedupe_factor",
            [_num_ids(plain) / _num_ids(unique) for plain, unique in pairs],
            unit="ratio",
            better="higher",
        ),
    ]


def _pairs(count: int) -> list[tuple[Batch, Batch]]:
    """Batches of plain KJTs and the same batches of IKJTs."""
    kjt = KjtConverter(KjtConverter.Options())
    ikjt = IkjtConverter(IkjtConverter.Options())
    rows = papercal_batches(count)
    ikjt.fit(rows[0], SCHEMA)
    return [(kjt.convert(batch, SCHEMA), ikjt.convert(batch, SCHEMA)) for batch in rows]


def _made(plugin: type[Preprocessing], options: Mapping[str, Any]) -> Preprocessing:
    return plugin(plugin.Options.model_validate(options))


def _figures(
    name: str,
    step: Preprocessing,
    pairs: list[tuple[Batch, Batch]],
    goal: float | None = None,
) -> list[Figure]:
    preprocess = Preprocess({feature: [step] for feature in SCHEMA.sparse})
    speedups, nanoseconds = [], []
    for turn in range(_TURNS + 1):
        plain_times = [processor_seconds(preprocess, plain) for plain, _ in pairs]
        unique_times = [processor_seconds(preprocess, unique) for _, unique in pairs]
        if turn == 0:  # for warming up
            continue
        for pair, on_plain, on_unique in zip(pairs, plain_times, unique_times, strict=True):
            factor = _num_ids(pair[0]) / _num_ids(pair[1])
            speedups.append(on_plain / on_unique / factor)
            nanoseconds.append(on_plain / _num_ids(pair[0]) * 1e9)
    return [
        Figure.of(
            f"{name}_speedup_over_dedupe_factor",
            speedups,
            unit="ratio",
            better="higher",
            goal=goal,
        ),
        Figure.of(f"{name}_ns_per_id", nanoseconds, unit="ns", better="lower"),
    ]


def _num_ids(batch: Batch) -> int:
    """Ids that are stored."""
    stored = [*batch.ikjts, *([] if batch.kjt is None else [batch.kjt])]
    return sum(sparse.values().numel() for sparse in stored)

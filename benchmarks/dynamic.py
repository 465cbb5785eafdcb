"""Speed of dynamic tables: lookups of raw ids compared to pandas and numpy, and training steps.

One thread looks up distinct random ids that all have a row. Times are CPU seconds. Also measures
the bytes of delta checkpoints, and the log loss of dynamic tables and of hashed ids.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks._deltas import delta_bytes
from benchmarks._dynamic_quality import log_losses
from benchmarks._dynamic_step import step_over_fixed
from benchmarks._measure import Findings, Size, higher, in_turn, ratios
from recd_plugin_dynamic.index.bucket_index import IdIndex
from recd_plugin_dynamic.index.policies import LeastRecentlyUsed

_ENTRIES: dict[Size, int] = {"tiny": 10_000, "small": 1_000_000, "reference": 10_000_000}
_BUCKETS = 8
OPTIONS = [
    click.Option(
        ["--movielens"],
        type=click.Path(exists=True, path_type=Path),
        help="File ml-100k.inter of examples/movielens, to measure log losses on MovieLens too.",
    )
]


def run(size: Size, movielens: Path | None = None) -> Findings:
    """Look up the same batches in the index, in a pandas index and in a sorted array."""
    entries, turns = _ENTRIES[size], 1 if size == "tiny" else 5
    batch = min(entries // 10, 100_000)
    draw = np.random.default_rng(0)
    ids = np.unique(draw.integers(0, 2**63 - 1, entries))
    index = IdIndex(0, _BUCKETS, _BUCKETS, entries // _BUCKETS * 11 // 10, LeastRecentlyUsed())
    shuffled = draw.permutation(ids)
    index.find_or_insert(shuffled, None, 0)
    pandas_index = pd.Index(shuffled)
    batches = [draw.choice(ids, batch, replace=False) for _ in range(10)]

    def look_up(each: NDArray[np.int64]) -> object:
        return index.find_or_insert(each, None, 1)

    against_pandas = in_turn(look_up, pandas_index.get_indexer, batches, turns)
    against_numpy = in_turn(look_up, ids.searchsorted, batches, turns)
    seconds, in_pandas = zip(*against_pandas, strict=True)
    beside_numpy, in_numpy = zip(*against_numpy, strict=True)
    rates = [batch / each / 1e6 for each in seconds]
    found = Findings(
        f"{entries:,} ids with policy lru, {len(batches)} batches of {batch:,} distinct known ids",
        [
            higher("find_or_insert_million_per_second", rates, "million ids/s", goal=20),
            higher("find_or_insert_over_pandas", ratios(in_pandas, seconds), goal=3),
            higher("find_or_insert_over_searchsorted", ratios(in_numpy, beside_numpy), goal=3),
        ],
    )
    found.add(step_over_fixed(size))
    found.add(delta_bytes(size))
    found.add(log_losses(size, movielens))
    return found

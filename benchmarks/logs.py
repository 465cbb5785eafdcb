"""Compression of logs sharded by session, compared to logs sharded at random."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks._measure import Figure, Findings, Size, higher, lower, ratios
from recd_plugin_recd import papercal
from recd_plugin_recd.logs.log import LogSettings, LogWriter
from recd_plugin_recd.papercal import RowKeys
from recd_plugin_recd.sessions import session_shards

NUM_SHARDS = 512
_SAMPLED = 5
# Full shards would contain hundreds of independent blocks.
_ROWS_A_SHARD: dict[Size, int] = {"tiny": 40, "small": 1300, "reference": 5200}


@dataclass(frozen=True)
class _Way:
    """Block size of a log, and whether to sort its rows by session."""

    block_mb: int
    sort: bool = False


def run(size: Size) -> Findings:
    """Write a sample of log shards and compare their compression ratios.

    Each shard is one run. Figures without "sorted" or "unsorted" in their name use the better order
    of each side.
    """
    rows = NUM_SHARDS * _ROWS_A_SHARD[size]
    by_session, at_random = _sampled_shards(rows)
    written = {way: _write(by_session, way) for way in _ways(1, 4, 16)}
    sessions = {way: found for way, (found, _) in written.items()}
    random = {way: _write(at_random, way)[0] for way in _ways(1, 4, 16)}

    def gain(name: str, *ways: _Way, **of: Any) -> Figure:
        base = _best(random, _ways(ways[0].block_mb))
        return higher(name, ratios(_best(sessions, ways), base), **of)

    figures = [
        gain("session_over_random_4mb", *_ways(4), paper=1.5, goal=2.2),
        gain("session_sorted_over_random_16mb", _Way(16, sort=True), goal=4),
        gain("session_unsorted_over_random_4mb", _Way(4)),
        gain("session_over_random_1mb", *_ways(1)),
        higher("random_ratio_4mb", _best(random, _ways(4))),
        higher("session_sorted_ratio_4mb", sessions[_Way(4, sort=True)]),
        higher("session_sorted_ratio_16mb", sessions[_Way(16, sort=True)]),
        lower("unsorted_4mb_cpu_us_per_row", written[_Way(4)][1], "us"),
        lower("sorted_4mb_cpu_us_per_row", written[_Way(4, sort=True)][1], "us"),
    ]
    return Findings(
        f"PAPERCAL, a stream of {rows / 1e6:.1f}M rows in {NUM_SHARDS} shards; {_SAMPLED} shards "
        "are written as Parquet with zstd-1",
        figures,
    )


def _ways(*sizes: int) -> list[_Way]:
    plain = [_Way(size) for size in sizes]
    return plain + [replace(way, sort=True) for way in plain]


def _best(found: dict[_Way, list[float]], ways: Iterable[_Way]) -> list[float]:
    """Return the compression ratios of the setting with the best median."""
    return max((found[way] for way in ways), key=lambda each: float(np.median(each)))


def _sampled_shards(rows: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Return some log shards in arrival order, first sharded by session, then at random."""
    random = np.random.default_rng(0)
    by_session: list[list[RowKeys]] = [[] for _ in range(_SAMPLED)]
    at_random: list[list[RowKeys]] = [[] for _ in range(_SAMPLED)]
    for keys in papercal.row_keys(rows, 0, "stream"):
        shards = session_shards(pa.array(keys.sessions), NUM_SHARDS)
        others = random.integers(0, NUM_SHARDS, len(keys))
        for number in range(_SAMPLED):
            by_session[number].append(keys[shards == number])
            at_random[number].append(keys[others == number])
    session_rows, random_rows = (
        [papercal.make_rows(RowKeys.concat(parts)) for parts in each]
        for each in (by_session, at_random)
    )
    return session_rows, random_rows


def _write(shards: list[pa.RecordBatch], way: _Way) -> tuple[list[float], list[float]]:
    """Write shards. Return compression ratios and CPU microseconds per row, one per shard."""
    settings = LogSettings(num_shards=1, block_size=way.block_mb << 20, sort=way.sort)
    found, costs = [], []
    for rows in shards:
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            with LogWriter(Path(folder), rows.schema, settings) as log:
                log.write(rows)
            costs.append((time.process_time() - start) / len(rows) * 1e6)
            found.append(log.raw_bytes / log.stored_bytes)
    return found, costs

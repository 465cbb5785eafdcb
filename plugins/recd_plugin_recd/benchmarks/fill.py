"""How much less of the processor it takes to fill a batch from a clustered table, in both layouts.

Filling is reading, decompressing and decoding into Arrow columns. Tables take turns, a pass each.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recd_plugin_recd.benchmarks.tables import (
    READ_BATCH,
    READ_TABLES,
    read_rows,
    read_workload,
    write_tables,
)
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.testing.benchmark import Figure, Size, keep_freed_memory

SUMMARY = "processor time that a table clustered by session saves when batches are filled"

_TURNS: dict[Size, int] = {"tiny": 1, "small": 9, "reference": 9}


def workload(size: Size) -> str:
    """The input in words."""
    return f"{read_workload(size)}, freed memory used again"


def run(size: Size) -> list[Figure]:
    """Measure."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_tables(Path(folder), read_rows(size), READ_TABLES)
        passes = [
            {name: _microseconds(path) for name, path in paths.items()}
            for _ in range(_TURNS[size] + 1)
        ][1:]
    return [
        _saved("list", passes, paper=0.50, goal=0.45),
        _saved("list_dict", passes, goal=0.80),
        *(
            Figure.of(
                f"{name}_us_per_row", [each[name] for each in passes], unit="us", better="lower"
            )
            for name in READ_TABLES
        ),
    ]


def _microseconds(path: Path) -> float:
    """Time a row of one pass over a table."""
    dataset = SessionParquet(SessionParquet.Options(path=path, prefetch=0))
    reader = dataset.reader(rank=0, world_size=1, batch_size=READ_BATCH, split="train")
    start = time.thread_time()
    num_rows = sum(len(rows) for rows in reader)
    return (time.thread_time() - start) / num_rows * 1e6


def _saved(
    name: str,
    passes: Sequence[dict[str, float]],
    *,
    paper: float | None = None,
    goal: float | None = None,
) -> Figure:
    shares = [1 - each[name] / each["interleaved"] for each in passes]
    return Figure.of(
        f"{name}_cpu_saved", shares, unit="share", better="higher", paper=paper, goal=goal
    )

"""Preprocessed tensors from Parquet on one thread: deduplicated in storage, and not at all.

Filling reads a batch of Arrow columns, converting makes KJTs or IKJTs of it, preprocessing hashes
every id. Sides take turns, a pass over its table each. Time is that of the processor. Memory that
was freed is used again; the figures ``_fresh`` leave that to the allocators.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recd_plugin_recd.benchmarks.tables import (
    READ_BATCH,
    READ_TABLES,
    read_rows,
    read_workload,
    write_tables,
)
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugin_recd.kjt import KjtConverter
from recd_plugin_recd.list_dict import ListDictConverter
from recd_plugin_recd.preprocessing import SigridHash
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.api import Converter
from recd_plugins.api.batches import Preprocess
from recd_plugins.testing.benchmark import Figure, Size, keep_freed_memory, one_thread

SUMMARY = "rows a second from Parquet to hashed tensors, clustered list_dict over interleaved lists"

_TURNS: dict[Size, int] = {"tiny": 1, "small": 9, "reference": 9}
_BUCKETS = 1_000_003
#: Ids of items repeat by chance, 1.7 times in a batch, and are faster left plain.
_MIN_FACTOR = {"min_dedupe_factor": 2}
_PARTS = ("fill", "convert", "preprocess")


def workload(size: Size) -> str:
    """The input in words."""
    return f"{read_workload(size)}, sigrid_hash of every id"


@dataclass(frozen=True)
class _Side:
    dataset: SessionParquet
    converter: Converter
    preprocess: Preprocess

    def microseconds(self) -> dict[str, float]:
        """One pass over the table: time a row of each part."""
        schema = self.dataset.schema()
        reader = self.dataset.reader(rank=0, world_size=1, batch_size=READ_BATCH, split="train")
        spent = dict.fromkeys(_PARTS, 0.0)
        batches, num_rows = iter(reader), 0
        rows, batch = None, None
        while True:
            start = time.thread_time()
            # What was read and made before goes first, as it does in training.
            rows = batch = None
            rows = next(batches, None)
            filled = time.thread_time()
            spent["fill"] += filled - start
            if rows is None:
                return {part: spent[part] / num_rows * 1e6 for part in _PARTS}
            batch = self.converter.convert(rows, schema)
            converted = time.thread_time()
            batch = self.preprocess(batch)
            spent["preprocess"] += time.thread_time() - converted
            spent["convert"] += converted - filled
            num_rows += len(rows)


def run(size: Size) -> list[Figure]:
    """Measure."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        paths = write_tables(Path(folder), read_rows(size), READ_TABLES)
        sides = {
            "interleaved": _side(paths["interleaved"], KjtConverter, {}),
            "list_kjt": _side(paths["list"], KjtConverter, {}),
            "list_ikjt": _side(paths["list"], IkjtConverter, _MIN_FACTOR),
            "list_dict": _side(paths["list_dict"], ListDictConverter, _MIN_FACTOR),
        }
        fresh = _passes(sides, _TURNS[size])
        result = [_speedup("list_dict_over_interleaved_fresh", fresh, "list_dict")]
        if keep_freed_memory():
            reused = _passes(sides, _TURNS[size])
            result = [*_figures(sides, reused), *result]
    return result


def _side(path: Path, converter: type[Converter], options: Mapping[str, Any]) -> _Side:
    dataset = SessionParquet(SessionParquet.Options(path=path, prefetch=0))
    made = converter(converter.Options.model_validate(options))
    schema = dataset.schema()
    reader = dataset.reader(rank=0, world_size=1, batch_size=READ_BATCH, split="train")
    made.fit(next(iter(reader)), schema)
    step = SigridHash(SigridHash.Options(buckets=_BUCKETS))
    return _Side(dataset, made, Preprocess({feature: [step] for feature in schema.sparse}))


def _passes(sides: Mapping[str, _Side], num_turns: int) -> list[dict[str, dict[str, float]]]:
    """Microseconds a row by side and part, for each turn after one for warming up."""
    turns = range(num_turns + 1)
    return [{name: side.microseconds() for name, side in sides.items()} for _ in turns][1:]


def _figures(
    sides: Mapping[str, _Side], passes: Sequence[dict[str, dict[str, float]]]
) -> list[Figure]:
    return [
        _speedup("list_dict_over_interleaved", passes, "list_dict", paper=1.79, goal=4.8),
        _speedup("list_ikjt_over_interleaved", passes, "list_ikjt"),
        _speedup("list_kjt_over_interleaved", passes, "list_kjt"),
        *(
            Figure.of(
                f"{name}_{part}_us_per_row",
                [each[name][part] for each in passes],
                unit="us",
                better="lower",
            )
            for name in sides
            for part in _PARTS
        ),
        Figure.of(
            "list_dict_rows_per_second",
            [1e6 / sum(each["list_dict"].values()) for each in passes],
            unit="rows/s",
            better="higher",
        ),
    ]


def _speedup(
    figure: str,
    passes: Sequence[dict[str, dict[str, float]]],
    side: str,
    *,
    paper: float | None = None,
    goal: float | None = None,
) -> Figure:
    ratios = [sum(each["interleaved"].values()) / sum(each[side].values()) for each in passes]
    return Figure.of(figure, ratios, unit="ratio", better="higher", paper=paper, goal=goal)

"""CPU time from Parquet to preprocessed tensors, with and without deduplicated storage.

A batch is read as Arrow columns (fill), converted to tensors (convert), and its ids are hashed
(preprocess). Variants alternate, one pass over their table each. Figures that end with ``_fresh``
allocate new memory; all other figures reuse freed memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._measure import (
    Figure,
    Findings,
    Size,
    higher,
    lower,
    one_thread,
    ratios,
)
from benchmarks._papercal import BATCH_SIZE, Order, Settings, write_tables
from recd_plugin_recd.ikjt import IkjtConverter, KjtConverter, ListDictConverter
from recd_plugin_recd.preprocessing import SigridHash
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.api import Converter
from recd_plugins.data.preprocess import Preprocess
from recd_plugins.runtime.machine import keep_freed_memory

# Rows, and number of turns after a warm-up turn.
_SIZES: dict[Size, tuple[int, int]] = {
    "tiny": (4096, 1),
    "small": (16_384, 9),
    "reference": (65_536, 9),
}
# A batch that spans two row groups is concatenated, so clustered tables are faster with larger
# row groups. Interleaved tables are not.
_TABLES: Mapping[str, tuple[Order, Settings]] = {
    "interleaved": ("stream", Settings("list", 8192)),
    "list": ("clustered", Settings("list", 16_384)),
    "list_dict": ("clustered", Settings("list_dict", 16_384)),
}
# Item ids repeat by chance, 1.7 times per batch, and are faster without deduplication.
_MIN_FACTOR = {"min_dedupe_factor": 2}
_PARTS = ("fill", "convert", "preprocess")
_Pass = dict[str, dict[str, float]]


@dataclass(frozen=True)
class _Side:
    dataset: SessionParquet
    converter: Converter
    preprocess: Preprocess

    def microseconds(self) -> dict[str, float]:
        """Return the CPU microseconds per row of each part, for one pass over the table."""
        schema = self.dataset.schema()
        reader = self.dataset.reader(rank=0, world_size=1, batch_size=BATCH_SIZE, split="train")
        spent = dict.fromkeys(_PARTS, 0.0)
        batches, num_rows = iter(reader), 0
        rows, batch = None, None
        while True:
            start = time.thread_time()
            # Free the previous batch first, as in training.
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


def run(size: Size) -> Findings:
    """Read all tables in alternating turns, with new memory and with reused memory."""
    rows, turns = _SIZES[size]
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        paths = write_tables(Path(folder), rows, _TABLES)
        sides = {
            "interleaved": _side(paths["interleaved"], KjtConverter, {}),
            "list_kjt": _side(paths["list"], KjtConverter, {}),
            "list_ikjt": _side(paths["list"], IkjtConverter, _MIN_FACTOR),
            "list_dict": _side(paths["list_dict"], ListDictConverter, _MIN_FACTOR),
        }
        fresh = _speedup("list_dict_over_interleaved_fresh", _passes(sides, turns), "list_dict")
        keep_freed_memory()
        figures = [*_figures(_passes(sides, turns)), fresh]
    return Findings(
        f"PAPERCAL, {rows} rows, batches of {BATCH_SIZE}, zstd-3, row groups of 8,192 rows "
        "interleaved and of 16,384 clustered, warm page cache, no prefetching, CPU time of one "
        "thread, sigrid_hash of every id",
        figures,
    )


def _side(path: Path, converter: type[Converter], options: Mapping[str, Any]) -> _Side:
    dataset = SessionParquet(SessionParquet.Options(path=path, prefetch=0))
    made = converter(converter.Options.model_validate(options))
    schema = dataset.schema()
    reader = dataset.reader(rank=0, world_size=1, batch_size=BATCH_SIZE, split="train")
    made.fit(next(iter(reader)), schema)
    step = SigridHash(SigridHash.Options(buckets=1_000_003))
    steps = {feature: [step] for feature in schema.sparse}
    return _Side(dataset, made, Preprocess(steps, schema.dense))


def _passes(sides: Mapping[str, _Side], turns: int) -> list[_Pass]:
    """Return CPU microseconds per row as one dict per turn, keyed by variant and part."""
    turn = range(turns + 1)
    return [{name: side.microseconds() for name, side in sides.items()} for _ in turn][1:]


def _figures(passes: list[_Pass]) -> list[Figure]:
    def saved(side: str) -> list[float]:
        return [1 - each[side]["fill"] / each["interleaved"]["fill"] for each in passes]

    return [
        _speedup("list_dict_over_interleaved", passes, "list_dict", paper=1.79, goal=4.8),
        _speedup("list_ikjt_over_interleaved", passes, "list_ikjt"),
        _speedup("list_kjt_over_interleaved", passes, "list_kjt"),
        higher("list_cpu_saved", saved("list_kjt"), "share", paper=0.50, goal=0.45),
        higher("list_dict_cpu_saved", saved("list_dict"), "share", goal=0.80),
        *(
            lower(f"{name}_{part}_us_per_row", [each[name][part] for each in passes], "us")
            for name in passes[0]
            for part in _PARTS
        ),
    ]


def _speedup(figure: str, passes: list[_Pass], side: str, **of: Any) -> Figure:
    totals = {name: [sum(each[name].values()) for each in passes] for name in ("interleaved", side)}
    return higher(figure, ratios(totals["interleaved"], totals[side]), **of)

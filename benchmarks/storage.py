"""Disk space of tables clustered by session, compared to tables ordered by time."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

from benchmarks._measure import Findings, Size, higher, lower
from benchmarks._papercal import Order, Settings, write_tables
from recd_plugins.data.list_dict import Layout

_ROWS: dict[Size, int] = {"tiny": 512, "small": 16_384, "reference": 131_072}
# Generated tables use row groups of this size.
_SAME = Settings("list_dict", row_group_rows=2048)
_SAME_LIST = Settings("list", row_group_rows=2048)
_LAYOUTS: tuple[Layout, ...] = ("list", "list_dict")
_SEARCHED = [Settings(*each) for each in product(_LAYOUTS, (8192, 16_384), (3, 9))]
# Large row groups favour rows ordered by time, but need 0.8 GB of memory each to read.
_LARGE = Settings("list_dict", row_group_rows=65_536, compression_level=9)
_ORDERS: tuple[Order, Order] = ("stream", "clustered")


def run(size: Size) -> Findings:
    """Write each table once and compare file sizes, which do not vary between runs."""
    rows = _ROWS[size]
    tables = {
        f"{order}-{number}": (order, each)
        for order, (number, each) in product(
            _ORDERS, enumerate([_SAME, _SAME_LIST, *_SEARCHED, _LARGE])
        )
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = write_tables(Path(folder), rows, tables)
        size_of = {key: paths[name].stat().st_size for name, key in tables.items()}
    best = {order: min(size_of[order, each] for each in _SEARCHED) for order in _ORDERS}

    def over(settings: Settings) -> float:
        return size_of["stream", settings] / size_of["clustered", settings]

    figures = [
        higher("interleaved_over_clustered_same", over(_SAME), paper=3.71, goal=7.2),
        higher("interleaved_over_clustered_same_list", over(_SAME_LIST)),
        higher("interleaved_over_clustered_best", best["stream"] / best["clustered"], goal=5),
        higher("interleaved_over_clustered_large_row_groups", over(_LARGE)),
    ]
    for order, word in zip(_ORDERS, ("interleaved", "clustered"), strict=True):
        figures.append(lower(f"{word}_best_bytes_per_row", best[order] / rows, "bytes"))
    return Findings(
        f"PAPERCAL, {rows} rows, zstd; ordered by time as in a stream of 1M concurrent rows. "
        f"Same: list_dict, row groups of {_SAME.row_group_rows} rows, level 3. Best: the smallest "
        "of list and list_dict, row groups of 8,192 and 16,384 rows, levels 3 and 9. "
        "Large: row groups of 65,536 rows, level 9",
        figures,
    )

"""What clustering by session saves on disk, at the same settings and at the best of each side."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

from recd_plugin_recd.benchmarks.tables import Order, Settings, write_tables
from recd_plugins.api.tables import Layout
from recd_plugins.testing.benchmark import Figure, Size

SUMMARY = "bytes of PAPERCAL on disk, by time over clustered by session"

# As many rows as generated tables have in a row group.
_SAME = Settings("list_dict", row_group_rows=2048)
_SAME_LIST = Settings("list", row_group_rows=2048)
_LAYOUTS: tuple[Layout, ...] = ("list", "list_dict")
# Up to what a reader decodes at once; levels that take more than ten times as long are left out.
_SEARCHED = [
    Settings(layout, rows, level)
    for layout, rows, level in product(_LAYOUTS, (8192, 16_384), (3, 9))
]

# By time the more rows a group has the more repeats it sees, until a reader cannot hold it: 65,536
# rows are 0.8 GB when they are decoded.
_LARGE = Settings("list_dict", row_group_rows=65_536, compression_level=9)


def _rows(size: Size) -> int:
    return {"tiny": 512, "small": 16_384, "reference": 131_072}[size]


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL, {_rows(size)} rows, zstd; by time as cut from a stream of a million rows in "
        f"flight. Same settings: list_dict, row groups of {_SAME.row_group_rows} rows, level 3. "
        f"Searched for the best: {' and '.join(_LAYOUTS)}, row groups of 8,192 and 16,384 rows, "
        "levels 3 and 9. Large: row groups of 65,536 rows, level 9"
    )


def run(size: Size) -> list[Figure]:
    """Measure: bytes do not vary, so every figure is of one run."""
    settings = [_SAME, _SAME_LIST, *_SEARCHED, _LARGE]
    num_bytes: dict[tuple[Order, Settings], int] = {}
    orders: tuple[Order, Order] = ("stream", "clustered")
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            f"{order}-{number}": (order, each)
            for order, (number, each) in product(orders, enumerate(settings))
        }
        paths = write_tables(Path(folder), _rows(size), tables)
        for name, key in tables.items():
            num_bytes[key] = paths[name].stat().st_size
    best = {order: min(num_bytes[order, each] for each in _SEARCHED) for order in orders}
    return [
        _ratio(
            "interleaved_over_clustered_same",
            num_bytes["stream", _SAME] / num_bytes["clustered", _SAME],
            paper=3.71,
            goal=7.2,
        ),
        _ratio(
            "interleaved_over_clustered_same_list",
            num_bytes["stream", _SAME_LIST] / num_bytes["clustered", _SAME_LIST],
        ),
        _ratio(
            "interleaved_over_clustered_best",
            best["stream"] / best["clustered"],
            goal=5,
        ),
        _ratio(
            "interleaved_over_clustered_large_row_groups",
            num_bytes["stream", _LARGE] / num_bytes["clustered", _LARGE],
        ),
        *(
            Figure.of(
                f"{'interleaved' if order == 'stream' else order}_{each.layout}"
                f"_{each.row_group_rows}_level_{each.compression_level}_bytes_per_row",
                [num_bytes[order, each] / _rows(size)],
                unit="bytes",
                better="lower",
            )
            for order, each in product(orders, _SEARCHED)
        ),
    ]


def _ratio(
    figure: str, value: float, *, paper: float | None = None, goal: float | None = None
) -> Figure:
    return Figure.of(figure, [value], unit="ratio", better="higher", paper=paper, goal=goal)

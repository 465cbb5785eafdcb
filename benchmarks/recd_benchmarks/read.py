"""How fast PAPERCAL is read from Parquet, clustered by session and not."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from recd_benchmarks.frame import Figure, Size, seconds
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.session_parquet import SessionParquet

SUMMARY = "reading PAPERCAL from Parquet on one thread, and its bytes on disk"

Layout = Literal["clustered", "stream"]
_BATCH = 512


def _rows(size: Size) -> int:
    return 16_384 if size == "small" else 131_072


def workload(size: Size) -> str:
    """The input in words."""
    return f"PAPERCAL, {_rows(size)} rows, 40 list columns, warm page cache, batches of {_BATCH}"


def run(size: Size) -> list[Figure]:
    """Measure."""
    with tempfile.TemporaryDirectory() as folder:
        clustered, clustered_bytes = _measure(Path(folder), "clustered", size)
        stream, stream_bytes = _measure(Path(folder), "stream", size)
    return [
        Figure.of("clustered_us_per_row", clustered, unit="us", better="lower"),
        Figure.of("stream_us_per_row", stream, unit="us", better="lower"),
        Figure.of(
            "stream_over_clustered_bytes",
            [stream_bytes / clustered_bytes],
            unit="ratio",
            better="higher",
        ),
    ]


def _measure(folder: Path, layout: Layout, size: Size) -> tuple[Sequence[float], int]:
    """Microseconds a row of each run, and bytes of the table."""
    rows = _rows(size)
    path = folder / layout
    write_table(path, TableOptions(rows=rows, layout=layout))
    options = {"path": path, "prefetch": 0}
    dataset = SessionParquet(SessionParquet.Options.model_validate(options))
    reader = dataset.reader(rank=0, world_size=1, batch_size=_BATCH, split="train")

    def read() -> None:
        for _ in reader:
            pass

    read()
    return (
        [seconds(read) / rows * 1e6 for _ in range(5)],
        sum(file.stat().st_size for file in path.iterdir()),
    )

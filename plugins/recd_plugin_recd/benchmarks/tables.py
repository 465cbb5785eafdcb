"""PAPERCAL on disk: as it is logged, and clustered by session in both layouts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recd_plugin_recd.papercal import SCHEMA, chunks, make_rows, row_keys
from recd_plugins.api import SessionKeys
from recd_plugins.api.columns import TableWriter
from recd_plugins.api.tables import Layout
from recd_plugins.testing.benchmark import Size

#: By time, cut from a stream with a million rows in flight; or by session.
Order = Literal["stream", "clustered"]

_KEYS = SessionKeys("session_id", "ts")
_CHUNK = 8192


@dataclass(frozen=True)
class Settings:
    """How a table is stored."""

    layout: Layout
    row_group_rows: int = 8192
    compression_level: int = 3


#: What a reader is given: a table as it is logged, and both ways to store it clustered. Row groups
#: that end with a session rarely end with a batch, and a batch over two of them is joined: larger
#: ones are faster there. Interleaved rows end with a batch, and other sizes were no faster.
READ_TABLES: Mapping[str, tuple[Order, Settings]] = {
    "interleaved": ("stream", Settings("list", 8192)),
    "list": ("clustered", Settings("list", 16_384)),
    "list_dict": ("clustered", Settings("list_dict", 16_384)),
}
#: What repeats in sessions. An item's lists stay lists, as the writer would choose for itself where
#: rows are clustered.
_LAYOUTS: Mapping[str, Layout] = {
    name: "list_dict" for name in SCHEMA.names if name.startswith(("seq_", "usr_"))
}


READ_BATCH = 4096


def read_rows(size: Size) -> int:
    """Rows of each of ``READ_TABLES``."""
    return {"tiny": 4096, "small": 16_384, "reference": 65_536}[size]


def read_workload(size: Size) -> str:
    """``READ_TABLES`` and how they are read, in words."""
    return (
        f"PAPERCAL, {read_rows(size)} rows, batches of {READ_BATCH}, zstd-3, row groups of 8,192 "
        "rows interleaved and of 16,384 clustered, warm page cache, no reading ahead, processor "
        "time of one thread"
    )


def write_tables(
    folder: Path, rows: int, tables: Mapping[str, tuple[Order, Settings]]
) -> dict[str, Path]:
    """Files by name, ``rows`` rows each; the tables of one order have the same rows."""
    paths = {name: folder / f"{name}.parquet" for name in tables}
    for order in {order for order, _ in tables.values()}:
        with ExitStack() as stack:
            writers = [
                stack.enter_context(_writer(paths[name], settings))
                for name, (its_order, settings) in tables.items()
                if its_order == order
            ]
            for keys in chunks(row_keys(rows, seed=0, layout=order), _CHUNK):
                batch = make_rows(keys)
                for writer in writers:
                    writer.write(batch)
    return paths


def _writer(path: Path, settings: Settings) -> TableWriter:
    return TableWriter(
        path,
        SCHEMA,
        keys=_KEYS,
        layout=_LAYOUTS if settings.layout == "list_dict" else "list",
        row_group_rows=settings.row_group_rows,
        compression_level=settings.compression_level,
    )

"""One small table, as many libraries write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc

ROWS: list[dict[str, Any]] = [
    {"user": "a", "item": 3, "price": 1.5, "seen": [1, 2]},
    {"user": None, "item": 2**53 + 1, "price": None, "seen": []},
    {"user": "c", "item": -1, "price": 0.25, "seen": None},
] * 4
TABLE = pa.Table.from_pylist(ROWS)
FLAT = TABLE.drop_columns("seen")


def write_iceberg(path: Path) -> Path:
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("c", uri=f"sqlite:///{path}/c.db", warehouse=f"file://{path}")
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", schema=TABLE.schema).append(TABLE)
    return path / "ns" / "t"


def write_duckdb(path: Path) -> Path:
    import duckdb

    with duckdb.connect(str(path / "t.duckdb")) as database:
        database.register("given", TABLE)
        database.execute("CREATE TABLE t AS SELECT * FROM given")
    return path / "t.duckdb"


def polars_writer(suffix: str, method: str) -> Callable[..., Path]:
    def write(path: Path, **options: object) -> Path:
        import polars as pl

        getattr(pl.from_arrow(TABLE), method)(path / f"t{suffix}", **options)
        return path / f"t{suffix}"

    return write


def write_dataset(path: Path) -> Path:
    import datasets

    datasets.Dataset(TABLE).save_to_disk(path / "t")
    return path / "t"


def write_delta(path: Path) -> Path:
    import deltalake

    deltalake.write_deltalake(path / "t", TABLE)
    return path / "t"


def write_lance(path: Path) -> Path:
    import lance

    lance.write_dataset(TABLE, path / "t.lance")
    return path / "t.lance"


def write_stream(path: Path) -> Path:
    with pa.ipc.new_stream(path / "t.arrows", TABLE.schema) as writer:
        writer.write_table(TABLE)
    return path / "t.arrows"


# Libraries are imported by those who write: files that are only collected need none.
WRITERS = {
    "Polars Parquet": polars_writer(".parquet", "write_parquet"),
    "Polars IPC": polars_writer(".arrow", "write_ipc"),
    "Polars NDJSON": polars_writer(".ndjson", "write_ndjson"),
    "Arrow stream": write_stream,
    "datasets": write_dataset,
    "Delta": write_delta,
    "Lance": write_lance,
    "Iceberg": write_iceberg,
    "DuckDB": write_duckdb,
}

"""An S3-compatible store on loopback and a table in it, for as long as the tests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.storage.counted_store import Store, counted_store

ROWS = 250


def table(rows: range) -> pa.Table:
    """Rows whose price and ids are their number, ``hour`` changes every 25 rows."""
    return pa.table(
        {
            "session_id": pa.array([row // 5 for row in rows], pa.int64()),
            "ts": pa.array(rows, pa.float64()),
            "label": pa.array([row % 2 for row in rows], pa.int8()),
            "price": pa.array(rows, pa.float32()),
            "seen": pa.array([[row] * (row % 3) for row in rows], pa.list_(pa.int64())),
            "liked": pa.array([[row, row + 1] for row in rows], pa.list_(pa.int64())),
            "hour": pa.array([row // 25 for row in rows], pa.int8()),
        }
    )


def write(folder: Path) -> Path:
    """250 rows in row groups of 30, in two files of a Hive partition each, and what is hidden."""
    for day, rows in (("01", range(100)), ("02", range(100, ROWS))):
        path = folder / f"day={day}"
        path.mkdir(parents=True)
        pq.write_table(table(rows), path / "part.parquet", row_group_size=30)
    (folder / "_committed.parquet").write_text("no Parquet, and no part of the table")
    (folder / "day=01" / ".part.parquet").write_text("neither")
    (folder / "notes.txt").write_text("nor this")
    return folder


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("local") / "clicks")


@pytest.fixture(scope="session")
def store(folder: Path) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch, counted_store() as running:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        running.upload(folder.parent, "tables")
        yield running

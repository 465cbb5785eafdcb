"""``--engine spark`` against the embedded engine, in a real Spark on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.cluster import spark
from recd_plugin_recd.cluster.job import ClusterOptions, cluster
from recd_plugins.data.parquet import read_footers
from recd_plugins.runtime.errors import SetupError


@pytest.fixture
def java() -> None:
    pytest.importorskip("pyspark", reason="the extra spark is not installed")
    if shutil.which("java") is None:
        pytest.skip("there is no Java")


def write(folder: Path, session: pa.DataType) -> None:
    random = np.random.default_rng(0)
    for name in ("dt=1/b 1.parquet", "dt=1/a%20.parquet", "dt=2/c.parquet"):
        sessions = pa.array(random.integers(-30, 30, 500))
        if pa.types.is_string(session):
            sessions = pa.array([f"sé-{n}-{'x' * (n + 30)}" for n in sessions.to_pylist()])
        lists = [random.integers(0, 9, random.integers(0, 4)).tolist() for _ in range(500)]
        table = pa.table(
            {
                "session_id": sessions.cast(session),
                "a.time": pa.array(random.integers(0, 5, 500)).cast(pa.timestamp("ns")),
                "ids": pa.array(lists, pa.list_(pa.int32())),
                "text": [None if row % 5 == 0 else str(row) for row in range(500)],
                "number": np.arange(500, dtype=np.uint32),
            }
        )
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)


def read(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.ParquetFile(file).read() for file in sorted(folder.iterdir()))


@pytest.mark.parametrize("session", [pa.int32(), pa.string()], ids=str)
def test_the_same_rows_out_of_both_engines(tmp_path, java, session, monkeypatch):
    monkeypatch.setattr(spark, "_RANGE_BYTES", 8000)
    write(tmp_path / "src", session)
    given: dict[str, Any] = {"timestamp": "a.time", "keep_share": 0.6, "seed": 5}
    for engine in ("embedded", "spark"):
        given["engine"] = engine
        report = cluster(ClusterOptions(tmp_path / "src", tmp_path / engine, **given))
        assert 500 < report.rows < 1400
    for hour in ("dt=1", "dt=2"):
        assert read(tmp_path / "spark" / hour).equals(read(tmp_path / "embedded" / hour))
    files = sorted((tmp_path / "spark").rglob("*.parquet"))
    assert len(files) > 2
    ours = read_footers(sorted((tmp_path / "embedded").rglob("*.parquet")))
    assert read_footers(files).sessions == ours.sessions  # type: ignore[union-attr]


def test_an_engine_that_is_missing_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path / "src", pa.int64())
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    options = ClusterOptions(tmp_path / "src", tmp_path / "dst", timestamp="a.time", engine="spark")
    with pytest.raises(SetupError, match=r"recd-plugins\[spark\]"):
        cluster(options)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]

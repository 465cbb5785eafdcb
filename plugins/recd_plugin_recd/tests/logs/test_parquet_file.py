"""Files that appear when they are complete."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.logs import parquet_file
from recd_plugin_recd.logs.parquet_file import ParquetFile, provenance
from recd_plugin_recd.tests.logs.tables import SCHEMA, rows
from recd_plugins.errors import DataError


def test_the_file_is_whole_at_the_moment_it_appears(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.parquet"
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append(pq.read_table(source).num_rows)
        replace(source, target)

    monkeypatch.setattr(parquet_file.os, "replace", look)
    with ParquetFile(path, SCHEMA) as file:
        file.write(rows(10))
        file.write(rows(5))
        assert not path.exists()
        file.close({"rows": 15})
    assert seen == [15]
    assert provenance(path) == {"rows": 15}
    assert [each.name for each in path.parent.iterdir()] == ["a.parquet"]


def test_what_fails_leaves_nothing(tmp_path):
    with ParquetFile(tmp_path / "a.parquet", SCHEMA) as file:
        file.write(rows(10))
    assert list(tmp_path.iterdir()) == []


def test_row_groups_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "_ROW_GROUP_BYTES", 2000)
    with ParquetFile(tmp_path / "a.parquet", SCHEMA) as file:
        for seed in range(10):
            file.write(rows(30, seed))
        file.close({})
    assert 3 < pq.read_metadata(tmp_path / "a.parquet").num_row_groups < 10


def test_other_files(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "b.parquet")
    assert provenance(tmp_path / "b.parquet") is None
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"c\.parquet: no readable Parquet file"):
        provenance(tmp_path / "c.parquet")
    with pytest.raises(DataError, match="cannot be written"):
        ParquetFile(tmp_path / "c.parquet" / "d.parquet", SCHEMA)

"""Where commands take whole tables from: Parquet, partitions of it, or a registry's dataset."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.sessions import open_source
from recd_plugins.interfaces import SessionKeys
from recd_plugins.runtime.errors import DataError


def write(path: Path, rows: range, **more: pa.Array) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "session_id": pa.array([row // 3 for row in rows], pa.int64()),
        "ts": pa.array(rows, pa.int64()),
        "label": pa.array([row % 2 for row in rows], pa.int8()),
        "price": pa.array([row / 2 for row in rows], pa.float32()),
        "note": pa.array([f"n{row}" for row in rows]),
        "seen": pa.array([[row] for row in rows], pa.list_(pa.int64())),
        "liked": pa.array([[row, 1] for row in rows], pa.list_(pa.int32())),
    }
    pq.write_table(pa.table({**columns, **more}), path, row_group_size=10)
    return path


def times(source, partition) -> list[int]:
    return [time for rows in source.read(partition) for time in rows.data["ts"].to_pylist()]


@pytest.mark.parametrize(("option", "column"), [("session", "visit"), ("timestamp", "ttt")])
def test_a_missing_column_is_an_error_that_names_the_option(tmp_path, option, column):
    path = write(tmp_path / "t.parquet", range(3))
    message = rf"t\.parquet: no column {column}; .*--{option}; the columns are session_id, ts"
    with pytest.raises(DataError, match=message):
        open_source(path, **{option: column})


def registry(folder: Path, dataset: str) -> Path:
    path = folder / "registry.yaml"
    path.write_text(f"version: 1\ndataset: {dataset}\nconverter: {{use: recd.kjt}}\n")
    return path


def test_a_registry_file_stands_for_its_training_split(tmp_path):
    write(tmp_path / "t.parquet", range(25))
    options = f"{{path: {tmp_path / 't.parquet'}, sparse: [seen], dense: [price]}}"
    source = open_source(registry(tmp_path, f"{{use: recd.session_parquet, options: {options}}}"))
    assert source.keys == SessionKeys("session_id", "ts")
    assert source.features == ("seen",)
    assert source.num_rows is None
    assert source.schema.names == ["seen", "price", "label", "session_id", "ts"]
    (partition,) = source.partitions
    assert times(source, partition) == times(source, partition) == list(range(25))
    for rows in source.read(partition, ["ts"]):
        assert rows.data.schema.names == ["ts"]
        assert rows.origin_of(0) == (str(tmp_path / "t.parquet"), rows.data["ts"][0].as_py())

"""``recd logs write`` and ``read``."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recd_plugin_recd.logs import log as log_module
from recd_plugin_recd.tests.logs.tables import SCHEMA, by_row, rows, write
from recd_plugins.cli import main
from recd_plugins.data.list_dict import list_dict_field, to_list_dict


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(rows(400)), "rows.parquet")
    return tmp_path


def run(*arguments: object, fails: str | None = None):
    result = CliRunner().invoke(main, ["logs", *map(str, arguments)])
    assert result.exit_code == (0 if fails is None else 1), result.output
    assert fails is None or fails in result.output
    return result


def read(path) -> pa.Table:
    return by_row(pq.read_table(path).cast(SCHEMA).to_batches())


def test_features_in_layout_list_dict(folder):
    batch = rows(200)
    fields = [*list(SCHEMA)[:3], list_dict_field("items")]
    packed = [*batch.columns[:3], to_list_dict(batch.column("items"))]
    pq.write_table(pa.table(pa.record_batch(packed, schema=pa.schema(fields))), "packed.parquet")
    run("write", "packed.parquet", "log")
    run("read", "log", "back.parquet")
    assert read("back.parquet").equals(by_row([batch]))


def test_a_log_is_appended_to_as_it_was_begun(folder):
    table = pq.read_table("rows.parquet").rename_columns(["visit", "row", "score", "items"])
    pq.write_table(table, "visits.parquet")
    begun = ["--shards", 3, "--session", "visit"]
    run("write", "visits.parquet", "log", *begun)
    run("write", "visits.parquet", "log", fails="log exists already. Use --append")
    assert "400 rows in 3 shards" in run("write", "visits.parquet", "log", "--append").stdout
    run("read", "log", "back.parquet")
    assert pq.read_metadata("back.parquet").num_rows == 800
    run("read", "log", "back.parquet", fails="back.parquet exists already. Use another path")
    run("read", "log", "back.parquet", "--force")
    run("read", "log", "rows.parquet", "--force", fails="--force cannot replace rows.parquet")
    run("read", "log", "log/log.json", "--force", fails="log/log.json is inside the log")


def test_a_source_that_fails_leaves_no_log(folder):
    pq.write_table(pa.table({"session_id": [1, None]}), "bad.parquet")
    run("write", "bad.parquet", "log", fails="row 1 (from 0), column 'session_id' is null")
    assert sorted(path.name for path in folder.iterdir()) == ["bad.parquet", "rows.parquet"]


def test_damage_is_told_and_the_rest_comes_out(folder):
    write(folder / "log", rows(400), num_shards=2, block_size=2000)
    path = folder / "log" / "shard-00001-000000.parquet"
    data = bytearray(path.read_bytes())
    data[100] ^= 16
    run("read", "rows.parquet", "back.parquet", fails="rows.parquet is not a log")
    path.write_bytes(data)
    result = run("read", "log", "back.parquet", fails="1 blocks or files are damaged")
    lost = 400 - pq.read_metadata("back.parquet").num_rows
    assert 0 < lost < 100
    assert f"log/{path.name}: block 0 cannot be read" in result.stderr
    assert f"{lost} rows are lost" in result.stderr


def test_offsets_read_only_what_is_new(folder, monkeypatch):
    run("write", "rows.parquet", "log")
    offsets = ["--offsets", "offsets.json"]
    with monkeypatch.context() as patch:  # killed before its offsets are written
        patch.setattr(log_module.Consumer, "commit", lambda _self: sys.exit(9))
        arguments = ["logs", "read", "log", "a.parquet", *offsets]
        assert CliRunner().invoke(main, arguments).exit_code == 9
    assert not (folder / "offsets.json").exists()
    assert (
        "an earlier run has already written 400 rows"
        in run("read", "log", "a.parquet", *offsets).stdout
    )
    assert "no new rows" in run("read", "log", "b.parquet", *offsets).stdout
    assert not (folder / "b.parquet").exists()
    pq.write_table(pa.table(rows(30, seed=1)), "more.parquet")
    run("write", "more.parquet", "log", "--append")
    assert "30 rows" in run("read", "log", "b.parquet", *offsets).stdout
    assert read("b.parquet").equals(read("more.parquet"))

from __future__ import annotations

import sys
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd, refusal

from recd_plugin_recd.logs import log as log_module
from recd_plugin_recd.tests.logs.tables import SCHEMA, by_row, rows, write
from recd_plugins.data.list_dict import list_dict_field, to_list_dict


@pytest.fixture
def folder(cwd):
    pq.write_table(pa.table(rows(400)), "rows.parquet")
    return cwd


run, failed = (partial(command, "logs") for command in (recd, refusal))


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
    assert "log exists already. Use --append" in failed("write", "visits.parquet", "log")
    assert "400 rows in 3 shards" in run("write", "visits.parquet", "log", "--append")
    run("read", "log", "back.parquet")
    assert pq.read_metadata("back.parquet").num_rows == 800
    assert "back.parquet exists already. Use another path" in failed("read", "log", "back.parquet")
    run("read", "log", "back.parquet", "--force")
    assert "--force cannot replace rows.parquet" in failed("read", "log", "rows.parquet", "--force")
    assert "log/log.json is inside the log" in failed("read", "log", "log/log.json", "--force")


def test_a_source_that_fails_leaves_no_log(folder):
    pq.write_table(pa.table({"session_id": [1, None]}), "bad.parquet")
    assert "row 1 (from 0), column 'session_id' is null" in failed("write", "bad.parquet", "log")
    assert sorted(path.name for path in folder.iterdir()) == ["bad.parquet", "rows.parquet"]


def test_damage_is_told_and_the_rest_comes_out(folder):
    write(folder / "log", rows(400), num_shards=2, block_size=2000)
    path = folder / "log" / "shard-00001-000000.parquet"
    data = bytearray(path.read_bytes())
    data[100] ^= 16
    assert "rows.parquet is not a log" in failed("read", "rows.parquet", "back.parquet")
    path.write_bytes(data)
    said = failed("read", "log", "back.parquet")
    assert "1 blocks or files are damaged" in said
    lost = 400 - pq.read_metadata("back.parquet").num_rows
    assert 0 < lost < 100
    assert f"log/{path.name}: block 0 cannot be read" in said
    assert f"{lost} rows are lost" in said


def test_offsets_read_only_what_is_new(folder, monkeypatch):
    run("write", "rows.parquet", "log")
    offsets = ["--offsets", "offsets.json"]
    with monkeypatch.context() as patch:  # killed before its offsets are written
        patch.setattr(log_module.Consumer, "commit", lambda _self: sys.exit(9))
        assert invoke("logs", "read", "log", "a.parquet", *offsets).exit_code == 9
    assert not (folder / "offsets.json").exists()
    said = run("read", "log", "a.parquet", *offsets)
    assert "an earlier run has already written 400 rows" in said
    assert "no new rows" in run("read", "log", "b.parquet", *offsets)
    assert not (folder / "b.parquet").exists()
    pq.write_table(pa.table(rows(30, seed=1)), "more.parquet")
    run("write", "more.parquet", "log", "--append")
    assert "30 rows" in run("read", "log", "b.parquet", *offsets)
    assert read("b.parquet").equals(read("more.parquet"))

"""``recd logs write``, ``read`` and ``stat``."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recd_plugin_recd.logs import export
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.tests.logs.tables import SCHEMA, by_row, rows
from recd_plugins.cli import main
from recd_plugins.data.list_dict import list_dict_field, to_list_dict


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(rows(400)), "rows.parquet")
    return tmp_path


def run(*arguments: object):
    return CliRunner().invoke(main, ["logs", *map(str, arguments)])


def read(path) -> pa.Table:
    return by_row(pq.read_table(path).cast(SCHEMA).to_batches())


def test_rows_go_to_a_log_and_back(folder):
    result = run("write", "rows.parquet", "log", "--shards", 3, "--block-size", 0.002)
    assert result.exit_code == 0, result.output
    assert "log: 400 rows in 3 shards" in result.stdout
    result = run("read", "log", "back.parquet")
    assert result.exit_code == 0, result.output
    assert read("back.parquet").equals(read("rows.parquet"))
    assert sorted(path.name for path in folder.iterdir()) == ["back.parquet", "log", "rows.parquet"]


def test_a_link_to_nothing_leads_to_the_log(folder):
    (folder / "link").symlink_to("log")
    assert run("write", "rows.parquet", "link").exit_code == 0
    assert run("read", "log", "back.parquet").exit_code == 0
    assert read("back.parquet").equals(read("rows.parquet"))


@pytest.mark.parametrize("record", ["sample", "batch"])
def test_papercal_comes_back_to_the_last_bit(folder, record):
    write_table(folder / "papercal", TableOptions(rows=600, layout="interleaved"))
    result = run("write", "papercal", "log", "--record", record, "--shards", 2)
    assert result.exit_code == 0, result.output
    assert run("read", "log", "back.parquet").exit_code == 0
    keys = [("session_id", "ascending"), ("ts", "ascending")]
    back = pq.read_table("back.parquet").sort_by(keys).combine_chunks()
    assert back.equals(pq.read_table("papercal").sort_by(keys).combine_chunks())


def test_a_folder_and_features_in_layout_list_dict(folder):
    batch = rows(200)
    fields = [*list(SCHEMA)[:3], list_dict_field("items")]
    packed = [*batch.columns[:3], to_list_dict(batch.column("items"))]
    for hour in (0, 1):
        (folder / "table" / f"hour={hour}").mkdir(parents=True)
        half = pa.record_batch(packed, schema=pa.schema(fields)).slice(100 * hour, 100)
        pq.write_table(pa.table(half), folder / "table" / f"hour={hour}" / "a.parquet")
    result = run("write", "table", "log")
    assert result.exit_code == 0, result.output
    assert run("read", "log", "back.parquet").exit_code == 0
    assert read("back.parquet").equals(by_row([batch]))


@pytest.mark.parametrize("value", [b"1234567", None])
def test_damaged_features_in_layout_list_dict(folder, value):
    batch = rows(20)
    schema = pa.schema([*list(SCHEMA)[:3], list_dict_field("items").with_nullable(True)])
    items = pa.array([*to_list_dict(batch.column("items"))[:7].to_pylist(), *[value] * 13])
    table = pa.table([*batch.columns[:3], items.cast(pa.binary())], schema=schema)
    pq.write_table(table, "damaged.parquet")
    result = run("write", "damaged.parquet", "log")
    if value is None:
        assert result.exit_code == 0, result.output
        assert run("read", "log", "back.parquet").exit_code == 0
        assert pq.read_table("back.parquet").sort_by("row")["items"].null_count == 13
        return
    assert result.exit_code == 1
    assert "damaged.parquet: row 7 (from 0), column 'items': the value has 7" in result.stderr
    assert not (folder / "log").exists()


def test_a_registry_file_is_a_source(folder):
    lines = [f"{1 + i % 3},{i},5,{1000 + 60 * i}" for i in range(30)]
    (folder / "log.csv").write_text("user_id,item_id,rating,timestamp\n" + "\n".join(lines))
    (folder / "registry.yaml").write_text(
        "version: 1\n"
        "dataset: {use: recd.interactions, options: {path: log.csv, test_fraction: 0.1}}\n"
        "converter: {use: recd.kjt}\n"
    )
    result = run("write", "registry.yaml", "log", "--shards", 2)
    assert result.exit_code == 0, result.output
    assert run("read", "log", "back.parquet").exit_code == 0
    back = pq.read_table("back.parquet")
    assert sorted(back["item_id"].combine_chunks().flatten().to_pylist()) == list(range(27))


def test_a_log_is_not_overwritten_but_appended_to(folder):
    assert run("write", "rows.parquet", "log").exit_code == 0
    result = run("write", "rows.parquet", "log")
    assert result.exit_code == 1
    assert "log exists already; --append adds to it" in result.output
    assert run("write", "rows.parquet", "log", "--append").exit_code == 0
    assert run("read", "log", "back.parquet").exit_code == 0
    assert pq.read_metadata("back.parquet").num_rows == 800
    result = run("read", "log", "back.parquet")
    assert result.exit_code == 1
    assert "back.parquet exists already; --force replaces it" in result.output
    assert run("read", "log", "back.parquet", "--force").exit_code == 0
    result = run("read", "log", "rows.parquet", "--force")
    assert result.exit_code == 1
    assert (
        "rows.parquet was not exported from a log, so --force does not replace it" in result.output
    )


def test_rows_are_appended_as_the_log_was_begun(folder):
    table = pq.read_table("rows.parquet").rename_columns(["visit", "row", "score", "items"])
    pq.write_table(table, "visits.parquet")
    begun = ["--shards", 3, "--key", "message", "--record", "batch", "--session", "visit"]
    assert run("write", "visits.parquet", "log", *begun).exit_code == 0
    result = run("write", "visits.parquet", "log", "--append")
    assert result.exit_code == 0, result.output
    assert "400 rows in 3 shards" in result.stdout
    assert run("read", "log", "back.parquet").exit_code == 0
    assert pq.read_metadata("back.parquet").num_rows == 800
    for option, value, message in (
        ("--shards", 4, "log: the log has 3 shards, not 4"),
        ("--key", "session", "begun with key message, not session"),
        ("--record", "sample", "begun with record batch, not sample"),
        ("--session", "row", "begun with session visit, not row"),
    ):
        result = run("write", "visits.parquet", "log", "--append", option, value)
        assert result.exit_code == 1
        assert message in result.output


def test_more_shards_than_files_that_may_be_open(folder):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, limits[0]), limits[1]))
    try:
        result = run("write", "rows.parquet", "log", "--shards", 300)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert result.exit_code == 1
    assert "take fewer shards, or raise the limit, `ulimit -n`" in result.output
    assert [path.name for path in folder.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is no JSON"),
        ("[]", "it has no object 'shards'"),
        ('{"version": 1}', "it has no object 'shards'"),
        ('{"shards": {"a": 1}}', "a does not say of which 'log' it is"),
        ('{"shards": {"a": {"log": "x"}}}', "a has None as its 'offset', not a whole number"),
        (
            '{"shards": {"a": {"log": "x", "offset": 0, "record": -1}}}',
            "a has -1 as its 'record', not a whole number",
        ),
    ],
)
def test_offsets_that_are_none(folder, content, message):
    run("write", "rows.parquet", "log")
    (folder / "offsets.json").write_text(content)
    result = run("read", "log", "a.parquet", "--offsets", "offsets.json")
    assert result.exit_code == 1
    assert f"offsets.json: no offsets of a log: {message}" in result.output
    assert "remove it to start from the first record" in result.output


def test_a_log_is_not_overwritten_by_its_rows(folder):
    run("write", "rows.parquet", "log", "--shards", 1)
    shard = folder / "log" / "shard-00000-of-00001.recdlog"
    before = shard.read_bytes()
    for source in (shard, "log"):
        result = run("read", source, shard, "--force")
        assert result.exit_code == 1
        assert "is what is read; name another file" in result.output
    result = run("read", "log", "offsets.json", "--offsets", "offsets.json")
    assert result.exit_code == 2
    assert "offsets.json is what" in result.output
    assert shard.read_bytes() == before


def test_sessions_that_are_a_dictionary(folder):
    table = pq.read_table("rows.parquet")
    names = pa.array([f"s{id}" for id in table["session_id"].to_pylist()]).dictionary_encode()
    table = table.set_column(0, "session_id", names)
    pq.write_table(table, "named.parquet")
    result = run("write", "named.parquet", "log", "--record", "batch", "--shards", 3)
    assert result.exit_code == 0, result.output
    assert run("read", "log", "back.parquet").exit_code == 0
    back = pq.read_table("back.parquet").sort_by("row")
    assert back.schema.equals(table.schema)
    assert back.to_pylist() == table.to_pylist()


def test_a_column_that_cannot_be_stored_is_told_with_its_file(folder):
    pq.write_table(pa.table({"session_id": [1], "names": [["a"]]}), "named.parquet")
    pq.write_table(pa.table({"session_id": [0.5]}), "floats.parquet")
    for name, message in (
        ("named", "column 'names' of type"),
        ("floats", "column 'session_id': session ids are of"),
    ):
        result = run("write", f"{name}.parquet", "log")
        assert result.exit_code == 1
        assert f"{name}.parquet: {message}" in result.output
        assert not (folder / "log").exists()


def test_a_source_that_fails_leaves_no_log(folder):
    bad = rows(5000).set_column(0, SCHEMA.field(0), pa.array([*range(4990), None, *range(9)]))
    pq.write_table(pa.table(bad), "bad.parquet")
    result = run("write", "bad.parquet", "log")
    assert result.exit_code == 1
    assert "bad.parquet: row 4990 (from 0): the session is null" in result.output
    for damaged in (b"PAR1", b""):
        (folder / "bad.parquet").write_bytes(damaged)
        result = run("write", "bad.parquet", "log")
        assert result.exit_code == 1
        assert "bad.parquet: no readable Parquet file" in result.output
    result = run("write", "rows.parquet", "log", "--session", "sesion_id")
    assert result.exit_code == 1
    assert "no column sesion_id; did you mean session_id?" in result.output
    assert sorted(path.name for path in folder.iterdir()) == ["bad.parquet", "rows.parquet"]


def test_damage_is_told_and_the_rest_comes_out(folder):
    run("write", "rows.parquet", "log", "--shards", 2, "--block-size", 0.002)
    path = folder / "log" / "shard-00001-of-00002.recdlog"
    data = bytearray(path.read_bytes())
    data[-100] ^= 16
    path.write_bytes(data)
    result = run("read", "log", "back.parquet")
    assert result.exit_code == 1
    assert f"log/{path.name}: byte " in result.stderr
    assert "the block's checksum is wrong; " in result.stderr
    assert "log is damaged in 1 places" in result.stderr
    lost = 400 - pq.read_metadata("back.parquet").num_rows
    assert 0 < lost < 50
    assert f"{lost} records lost" in result.stderr
    result = run("read", "log", "back.parquet", "--force", "--skip-damaged")
    assert result.exit_code == 0
    assert f"{lost} records lost" in result.stderr

    result = run("stat", "log", "--json", "report.json")
    assert result.exit_code == 1
    report = json.loads((folder / "report.json").read_text())
    assert report["records"] == 400 - lost
    (damage,) = report["shards"][1]["damage"]
    assert damage["records_lost"] == lost


def test_offsets_read_only_what_is_new(folder):
    run("write", "rows.parquet", "log")
    assert "400 rows" in run("read", "log", "a.parquet", "--offsets", "offsets.json").stdout
    assert "nothing new" in run("read", "log", "b.parquet", "--offsets", "offsets.json").stdout
    assert not (folder / "b.parquet").exists()
    pq.write_table(pa.table(rows(30, seed=1)), "more.parquet")
    run("write", "more.parquet", "log", "--append")
    assert "30 rows" in run("read", "log", "b.parquet", "--offsets", "offsets.json").stdout
    assert read("b.parquet").equals(read("more.parquet"))


def test_a_run_that_is_killed_before_its_offsets_are_written(folder, monkeypatch):
    run("write", "rows.parquet", "log")
    with monkeypatch.context() as patch:
        patch.setattr(export.Consumer, "commit", lambda _self: sys.exit(9))
        assert run("read", "log", "a.parquet", "--offsets", "offsets.json").exit_code == 9
    assert not (folder / "offsets.json").exists()
    result = run("read", "log", "a.parquet", "--offsets", "offsets.json")
    assert result.exit_code == 0, result.output
    assert "was written before, 400 rows" in result.stdout
    assert "nothing new" in run("read", "log", "b.parquet", "--offsets", "offsets.json").stdout


def test_stat_counts(folder):
    run("write", "rows.parquet", "log", "--shards", 2, "--block-size", 0.002)
    result = run("stat", "log", "--json", "report.json")
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["records"] == sum(shard["records"] for shard in report["shards"]) == 400
    sizes = [path.stat().st_size for path in sorted((folder / "log").glob("*.recdlog"))]
    assert [shard["bytes"] for shard in report["shards"]] == sizes
    assert report["bytes"] == sum(sizes)
    lists = by_row([rows(400)]).column("items").combine_chunks()
    assert report["raw_bytes"] == 400 * 25 + 8 * len(lists.flatten())
    assert all(shard["blocks"] > 3 and not shard["damage"] for shard in report["shards"])


def test_torch_is_not_needed(folder):
    program = (
        "import sys\n"
        "from recd_plugins.cli import main\n"
        "main(['logs', 'write', 'rows.parquet', 'log'], standalone_mode=False)\n"
        "main(['logs', 'read', 'log', 'back.parquet'], standalone_mode=False)\n"
        "main(['logs', 'stat', 'log'], standalone_mode=False)\n"
        "assert not {'torch', 'torchrec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

"""Tables of every format: the same rows, whoever wrote them; and what is none is told."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from unittest.mock import ANY

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from recd_plugin_tables.sources import SourceOptions, open_source
from recd_plugin_tables.tests.writers import FLAT, ROWS, TABLE, WRITERS, write_delta, write_duckdb
from recd_plugins.runtime.errors import DataError


def read(path: str | Path, **options: object) -> list[dict]:
    source = open_source(path, options=SourceOptions.model_validate(options))
    batches = list(source.batches())
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert source.num_rows in (None, len(rows))
    assert source.identity() == json.loads(json.dumps(source.identity()))
    last = source.schema.names[-1]
    chosen = [row for batch in source.batches([last]) for row in batch.to_pylist()]
    assert chosen == [{last: row[last]} for row in rows]
    return rows


@pytest.mark.parametrize("writer", WRITERS)
def test_a_table_is_read_as_it_was_written(writer, tmp_path):
    assert read(WRITERS[writer](tmp_path)) == ROWS


EUROPEAN = {"separator": ";", "decimal": ","}


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (
            'country,note,n\nNA,"a\nb, c",NA\nnull,,2\nGB,n,1\n',
            {},
            {"country": ["NA", "null", "GB"], "note": ["a\nb, c", None, "n"], "n": [None, 2, 1]},
        ),
        # More than 64 bits are text, unless others have fractions.
        (
            "order,amount\n20260501123456789012,1e20\n7,12345678901234567890\n",
            {},
            {"order": ["20260501123456789012", "7"], "amount": [1e20, 12345678901234567890.0]},
        ),
        ("zip,n\n01234,1\n-05,0\n", {}, {"zip": ["01234", "-05"], "n": [1, 0]}),
        ("zip,n\n01234,1\n", {"types": {"zip": "int64"}}, {"zip": [1234], "n": [1]}),
        ("196;2,5\n", {"header": ["u", "x"], **EUROPEAN}, {"u": [196], "x": [2.5]}),
    ],
)
def test_values_of_text(text, options, expected, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    assert pa.Table.from_pylist(read(tmp_path / "t.csv", **options)).to_pydict() == expected


@pytest.mark.parametrize("suffix", [".csv", ".CSV.GZ", ".jsonl", ".JSONL.GZ"])
def test_suffixes_in_capitals_and_a_byte_order_mark(suffix, tmp_path):
    path = tmp_path / f"t{suffix}"
    text = '{"a": 1, "b": "x"}\n' if "json" in suffix.lower() else "a,b\n1,x\n"
    packed = gzip.compress if suffix.endswith(".GZ") else bytes
    path.write_bytes(packed(text.encode("utf-8-sig")))
    assert read(path) == [{"a": 1, "b": "x"}]


def test_a_folder_is_one_table_whose_folders_may_be_columns(tmp_path):
    for day, rows in (("2024-05-02", FLAT.slice(4)), ("2024-05-01", FLAT.slice(0, 4))):
        folder = tmp_path / f"day={day}" / "shard=7"
        folder.mkdir(parents=True)
        pq.write_table(rows, folder / "x.parquet")
        (folder / "_SUCCESS").touch()
    rows = read(tmp_path)
    assert rows == [{**row, "day": ANY, "shard": 7} for row in FLAT.to_pylist()]
    assert [row["day"] for row in rows] == ["2024-05-01"] * 4 + ["2024-05-02"] * 8
    for part in (folder.parent, folder, folder / "x.parquet"):
        assert read(part) == rows[:4]
    pq.write_table(FLAT.append_column("shard", [["own"] * 12]), folder / "x.parquet")
    assert {row["shard"] for row in read(folder)} == {"own"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["03", "-1"], [3, -1]),
        (["0123", "123"], ["0123", "123"]),
        (["1_0", "10"], ["1_0", "10"]),
        (["9" * 20, "1"], ["9" * 20, "1"]),
    ],
)
def test_keys_of_folders_stay_apart(tmp_path, keys, expected):
    for key in keys:
        (tmp_path / f"code={key}").mkdir()
        pq.write_table(FLAT.slice(0, 1), tmp_path / f"code={key}" / "x.parquet")
    assert {row["code"] for row in read(tmp_path)} == set(expected)


def test_files_of_a_store_are_read_as_those_of_a_disk():
    store = fsspec.filesystem("memory")
    for day in (1, 2):
        with store.open(f"/table/day={day}/x.csv", "wb") as file:
            pa.csv.write_csv(FLAT, file)
    rows = read("memory://table")
    assert [row["day"] for row in rows] == [1] * 12 + [2] * 12
    with store.open("/table/_delta_log/0.json", "wb") as file:
        file.write(b"{}")
    with pytest.raises(DataError, match="memory://table: the table cannot be read"):
        open_source("memory://table")


def test_a_split_and_a_query_are_chosen_by_name(tmp_path):
    import datasets
    import duckdb

    parts = {"train": datasets.Dataset(TABLE), "test": datasets.Dataset(TABLE.slice(0, 3))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "hf")
    assert len(read(tmp_path / "hf", table="test")) == 3
    with pytest.raises(DataError, match=r"several splits. Set source.table .* 'train', 'test"):
        read(tmp_path / "hf")
    database = write_duckdb(tmp_path)
    query = "SELECT item * 2 AS double FROM t WHERE item < 9 ORDER BY item;"
    assert [row["double"] for row in read(database, query=query)] == [-2] * 4 + [6] * 4
    with pytest.raises(DataError, match=r"no table 'other'. .* one of: 't'"):
        read(database, table="other")
    with duckdb.connect(database) as connection:
        connection.execute('CREATE TABLE "we.ird" AS SELECT 7 AS a')
        connection.execute("CREATE SCHEMA s; CREATE TABLE s.t AS SELECT 8 AS a")
    assert read(database, table="we.ird") == [{"a": 7}]
    assert read(database, table="s.t") == [{"a": 8}]
    with pytest.raises(DataError, match=r"t.duckdb: the table cannot be read: .*nowhere"):
        read(database, query="SELECT * FROM nowhere")


def test_a_commit_that_is_still_in_the_log_of_duckdb_counts(tmp_path):
    path = write_duckdb(tmp_path)
    source = open_source(path)
    before = source.identity()
    assert source.identity() == before
    # Killed after a commit, which is then not yet in the file.
    insert = f"c = duckdb.connect('{path}'); c.execute('INSERT INTO t SELECT * FROM t')"
    script = f"import duckdb, os; {insert}; os._exit(0)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert path.with_name("t.duckdb.wal").is_file()
    assert source.identity() != before
    assert len(read(path)) == 24


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("SELECT 1; SELECT 2", "SELECT, SELECT"),
        ("SELECT * FROM t; COPY t TO 'out.csv'", "SELECT, COPY"),
        ("ATTACH 'out.db'", "ATTACH"),
        ("-- nothing", "the query is empty"),
        ("SELECT 1); COPY (SELECT 1) TO 'out.csv'; SELECT * FROM (SELECT 1", "cannot parse the"),
    ],
)
def test_a_query_is_one_select(query, found):
    with pytest.raises(ValidationError, match=found):
        SourceOptions(query=query)


@pytest.mark.parametrize("rows", ["read_csv('{}')", "'{}'"])
def test_a_duckdb_query_or_view_reads_no_other_file(rows, tmp_path):
    import duckdb

    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    rows = rows.format(other)
    path = write_duckdb(tmp_path)
    with duckdb.connect(path) as database:
        database.execute(f"CREATE VIEW v AS SELECT * FROM {rows}")
    for options in ({"query": f"SELECT * FROM {rows}"}, {"table": "v"}):
        said = r"query or view reads files outside the database.*CREATE TABLE"
        with pytest.raises(DataError, match=said):
            read(path, **options)
    assert read(path, table="t") == ROWS


@pytest.mark.parametrize(
    "query",
    [
        "WITH x AS (INSERT INTO t SELECT * FROM t RETURNING *) SELECT * FROM x",
        "SELECT * FROM query('COPY t TO ''out.csv''')",
    ],
)
def test_a_duckdb_query_changes_nothing(query, cwd):
    path = write_duckdb(cwd)
    before = path.read_bytes()
    with pytest.raises((DataError, ValidationError)):
        read(path, query=query)
    assert path.read_bytes() == before
    assert [each.name for each in cwd.iterdir()] == ["t.duckdb"]


def test_a_delta_table_whose_columns_are_mapped_is_refused(tmp_path):
    path = write_delta(tmp_path)
    (log,) = (path / "_delta_log").glob("*.json")
    plain, mapped = '"configuration":{', '"configuration":{"delta.columnMapping.mode":"name"'
    log.write_text(log.read_text().replace(plain, mapped))
    with pytest.raises(DataError, match=r"uses column mapping .*mode: name.*Write a copy"):
        read(path)


def test_deleted_rows_of_a_delta_table_stay_away(tmp_path):
    import deltalake

    path = write_delta(tmp_path)
    deltalake.DeltaTable(path).delete("user = 'a'")
    assert [row["user"] for row in read(path)] == [None, "c"] * 4
    with pytest.raises(DataError, match=r"is a delta table, whose .*Remove format: parquet"):
        read(path, format="parquet")


CUT = gzip.compress(b"a,b\n" + b"1,2\n" * 9)[:-12]
DEEP = b'{"a": "[{"}\n{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n"
BAD = [
    ("t.parquet", b"PAR1 and no more", "t.parquet: the parquet file cannot be read"),
    ("t.csv.gz", CUT, "t.csv.gz: the csv file cannot be read: .*[Tt]runcated"),
    ("t.csv", b"a;b\n1;2,5\n", "t.csv: .*Expected 1 columns.* set source.separator: ';'"),
    ("t.csv", b'a,b\n0,x\n0,"y\n0,z\n', r"row 1 \(from 0\) has an unclosed quote"),
    ("t.jsonl", DEEP, r"row 1 \(from 0\) is nested 100,001 levels deep, but at most 64 are"),
    ("t.json", b'[{"a": 1}]', "the file is one JSON array"),
    ("t.csv", b"a,a\n1,2\n", "t.csv: 2 columns have the name"),
    ("t.tsv", b"196\t242\n", r"first line contains '196', '242' .*--header f1,f2\)"),
    (
        "t.tsv",
        b"1\t\t\tab\n0\t5\t\tcd\n",
        r"first line contains '1', '', '', 'ab' instead of .* the 4 column names in source.header",
    ),
    ("t.csv", "a\ncafé\n".encode("latin1"), "column 'a' contains text that is not UTF-8"),
]


@pytest.mark.parametrize("file", BAD, ids=itemgetter(2))
def test_what_is_no_table_is_told(file, tmp_path):
    name, content, message = file
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_a_row_without_a_named_column_is_told(tmp_path):
    path, header = tmp_path / "t.csv", ("label", "a", "b")
    path.write_text("1,2\n3,4\n")
    said = r"t.csv: Row #1 has 2 columns instead of 3.*unknown values empty"
    with pytest.raises(DataError, match=said):
        read(path, header=header)
    path.write_text(",1,2\n,3,4\n")
    assert read(path, header=header)[1] == {"label": None, "a": 3, "b": 4}


def test_an_arrow_stream_cut_anywhere_is_told(tmp_path):
    path = tmp_path / "t.arrows"
    with path.open("wb") as file, pa.ipc.new_stream(file, FLAT.schema) as writer:
        ends = [file.tell()]
        for _ in range(3):
            writer.write_table(FLAT)
            file.flush()
            ends.append(file.tell())
    whole = path.read_bytes()
    assert len(read(path)) == 3 * len(ROWS)
    for at in [*ends, ends[2] - 8, len(whole) - 4, len(whole) - 1]:
        path.write_bytes(whole[:at])
        with pytest.raises(DataError, match=r"t.arrows: "):
            read(path)
    path.write_bytes(whole[: ends[2]])
    with pytest.raises(DataError, match=r"no end-of-stream marker after 24 rows"):
        read(path)
    path.write_bytes(whole + whole)
    with pytest.raises(DataError, match=r"no end-of-stream marker after 36 rows"):
        read(path)


def test_a_hugging_face_dataset_cut_between_batches_is_told(tmp_path):
    import datasets

    datasets.Dataset(TABLE).save_to_disk(tmp_path / "t")
    (file,) = (tmp_path / "t").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"t: .*\.arrow is truncated"):
        read(tmp_path / "t")


def test_files_that_are_not_one_table_are_told(tmp_path):
    pq.write_table(FLAT, tmp_path / "a.parquet")
    pq.write_table(FLAT.drop_columns("price"), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"only one of .* has column 'price'"):
        read(tmp_path)
    pq.write_table(FLAT.set_column(1, "item", [["x"] * 12]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet: the column types differ"):
        read(tmp_path)
    (tmp_path / "b.parquet").unlink()
    (tmp_path / "notes.csv").write_text("a\n1\n")
    said = r"different formats: 'parquet' .*, 'csv' .*. Set source.format"
    with pytest.raises(DataError, match=said):
        read(tmp_path)
    assert len(read(tmp_path, format="parquet")) == len(ROWS)


def test_times_in_96_bits_are_what_they_are(tmp_path):
    times = [datetime(2026, 5, 1, 10, 30), None, datetime(9999, 12, 31)]
    rows = [{"until": each, "deep": [{"at": each}]} for each in times]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, use_deprecated_int96_timestamps=True)
    assert read(path) == rows

"""``recd cluster``: what it writes, whatever the memory, types, partitions and layout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd

from recd_plugin_recd.cluster import sort
from recd_plugins.data.list_dict import is_list_dict, to_lists
from recd_plugins.data.parquet import read_footers


def make_table(num_rows: int, *, sessions: int = 40, seed: int = 0) -> pa.Table:
    """Rows in no order, with ties in time; ``row`` numbers them as they come."""
    random = np.random.default_rng(seed)
    lists = [random.integers(0, 9, random.integers(0, 5)).tolist() for _ in range(num_rows)]
    return pa.table(
        {
            "session_id": random.integers(-sessions, sessions, num_rows),
            "ts": random.integers(0, 6, num_rows),
            "label": random.integers(0, 2, num_rows).astype(np.int8),
            "dense": random.random(num_rows).astype(np.float32),
            "ids": pa.array(lists, pa.list_(pa.int64())),
            "few": pa.array([row[:1] for row in lists], pa.list_(pa.int32())),
            "name": [None if row % 7 == 0 else f"n{row}" for row in range(num_rows)],
            "nested": [{"a": [str(row)], "b": None} for row in range(num_rows)],
            "row": np.arange(num_rows),
        }
    )


def write(table: pa.Table, path: Path, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def read(folder: Path) -> pa.Table:
    tables = [plain(pq.ParquetFile(file).read()) for file in files(folder)]
    return pa.concat_tables(tables).combine_chunks()


def plain(table: pa.Table) -> pa.Table:
    columns = {}
    for field in table.schema:
        column = table[field.name].combine_chunks()
        if is_list_dict(field):
            column = to_lists(column)
        columns[field.name] = column.to_pylist() if pa.types.is_nested(column.type) else column
    return pa.table(columns)


def in_order(table: pa.Table) -> pa.Table:
    keys = [("session_id", "ascending"), ("ts", "ascending"), ("row", "ascending")]
    return plain(table.sort_by(keys))


@pytest.fixture
def little(monkeypatch) -> None:
    """Memory of 4 KB for a range and 3 ranges at once: rows are dealt again and again."""
    monkeypatch.setattr(sort, "_plan", lambda *_: sort.Plan(range_bytes=4096, workers=2))
    monkeypatch.setattr(sort, "_MOST_RANGES", 3)
    monkeypatch.setattr(sort, "_BATCH_BYTES", 8192)


@pytest.mark.parametrize("ranges", ["one range", "many"])
def test_rows_by_session_and_time_and_ties_as_they_came(tmp_path, ranges, request):
    if ranges == "many":
        request.getfixturevalue("little")
    table = make_table(3000)
    write(table.slice(0, 1000), tmp_path / "src" / "a.parquet", row_group_size=300)
    write(table.slice(1000), tmp_path / "src" / "b.parquet")
    recd("cluster", tmp_path / "src", tmp_path / "dst", "--json", tmp_path / "report.json")
    assert read(tmp_path / "dst").equals(in_order(table))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "report.json", "src"]

    written = files(tmp_path / "dst")
    sessions = [set(pq.read_table(file)["session_id"].to_pylist()) for file in written]
    assert len(sessions) >= (20 if ranges == "many" else 1)
    assert sum(map(len, sessions)) == len(set.union(*sessions)), "a session is in one file"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["sessions"]) == (3000, len(set.union(*sessions)))
    assert read_footers(written).features["ids"].ids == len(table["ids"].combine_chunks().flatten())


def test_one_session_larger_than_the_memory(tmp_path, little):
    table = make_table(2000, sessions=1).set_column(0, "session_id", pa.array(np.full(2000, 7)))
    table = table.set_column(1, "ts", pa.array(np.arange(2000) // 1500))
    write(table, tmp_path / "src.parquet")
    recd("cluster", tmp_path / "src.parquet", tmp_path / "dst", "--row-group-rows", 100)
    assert len(files(tmp_path / "dst")) == 1
    assert read(tmp_path / "dst").equals(in_order(table))


@pytest.mark.parametrize(
    ("session", "time"),
    [
        (pa.string(), pa.int64()),
        (pa.dictionary(pa.int32(), pa.string()), pa.timestamp("us")),
        (pa.uint64(), pa.timestamp("ns", "UTC")),
        (pa.binary(16), pa.int64()),
        (pa.float32(), pa.float64()),
    ],
    ids=str,
)
def test_types_of_sessions_and_times(tmp_path, little, session, time):
    table = make_table(600)
    numbers = table["session_id"].to_numpy() + 40
    values = pa.array(numbers)
    if pa.types.is_fixed_size_binary(session):
        values = pa.array([b"%016d" % number for number in numbers], session)
    elif pa.types.is_string(session) or pa.types.is_dictionary(session):
        values = pa.array([f"sé{number}" for number in numbers])
    table = table.set_column(0, "session_id", values)
    encode = pa.types.is_dictionary(session)
    stored = values.cast(session.value_type).dictionary_encode() if encode else values.cast(session)
    written = table.set_column(0, "session_id", stored)
    write(written.set_column(1, "ts", table["ts"].cast(time)), tmp_path / "src.parquet")
    recd("cluster", tmp_path / "src.parquet", tmp_path / "dst")
    found = pa.concat_tables([pq.read_table(file) for file in files(tmp_path / "dst")])
    assert found["row"].to_pylist() == in_order(table)["row"].to_pylist()
    assert found["session_id"].type == session
    assert len(files(tmp_path / "dst")) > 1


def test_partitions_stay_and_are_sorted_by_themselves(tmp_path):
    table = make_table(900)
    hours = ["dt=1/hour=00", "dt=1/hour=01", "dt=2/hour=00"]
    for number, hour in enumerate(hours):
        write(table.slice(300 * number, 300), tmp_path / "src" / hour / "x.parquet")
    recd("cluster", tmp_path / "src", tmp_path / "dst")
    for number, hour in enumerate(hours):
        assert read(tmp_path / "dst" / hour).equals(in_order(table.slice(300 * number, 300)))


def test_whole_sessions_stay_when_downsampled(tmp_path, little):
    table = make_table(4000, sessions=300)
    write(table, tmp_path / "src.parquet")
    for name, options in {"a": [], "b": [], "c": ["--seed", 1]}.items():
        arguments = ["--downsample-sessions", 0.25, *options]
        recd("cluster", tmp_path / "src.parquet", tmp_path / name, *arguments)
    sessions = [set(read(tmp_path / name)["session_id"].to_pylist()) for name in "abc"]
    kept = pa.array([each in sessions[0] for each in table["session_id"].to_pylist()])
    assert read(tmp_path / "a").equals(in_order(table.filter(kept)))
    assert sessions[0] == sessions[1] != sessions[2]
    assert 90 < len(sessions[0]) < 210


def test_list_dict_out_and_in(tmp_path, little):
    table = make_table(600, sessions=10)
    same = pa.array([[session] * 20 for session in table["session_id"].to_pylist()])
    table = table.set_column(4, "ids", same)
    write(table, tmp_path / "src.parquet")
    for source, target in (("src.parquet", "a"), ("a", "b")):
        recd("cluster", tmp_path / source, tmp_path / target, "--layout", "list_dict")
        stored = [pq.read_schema(file).field("ids") for file in files(tmp_path / target)]
        assert all(map(is_list_dict, stored))
        assert read(tmp_path / target)["ids"].equals(in_order(table)["ids"])


def test_the_least_memory_is_enough(tmp_path):
    table = make_table(40).set_column(4, "ids", pa.array([[7] * 700] * 40))
    write(table, tmp_path / "src" / "x.parquet")
    program = (
        "from pathlib import Path; from recd_plugins.cli import main; main(standalone_mode=False)\n"
        "print(Path('/proc/self/status').read_text())"
    )
    command = [sys.executable, "-c", program, "cluster", "src", "dst", "--memory"]
    refused = subprocess.run([*command, "300MB"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1
    least = re.findall(r"300 MB is too small: sorting needs at least (\d+)MB", refused.stderr)[-1]
    assert os.listdir(tmp_path) == ["src"]
    assert invoke("cluster", "a", "b", "--memory", "much").exit_code == 2
    done = subprocess.run([*command, f"{least}MB"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert int(peak) * 1024 <= int(least) * 10**6

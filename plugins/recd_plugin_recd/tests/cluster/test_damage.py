"""Wrong and damaged input, and places that cannot be written: one error, nothing half written."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import forked

from recd_plugin_recd.cluster.job import cluster
from recd_plugin_recd.cluster.options import ClusterOptions
from recd_plugins.runtime.errors import DataError, SetupError

ROWS = 3000


def good(num_rows: int = ROWS) -> pa.Table:
    random = np.random.default_rng(0)
    lists = pa.array([[row] * 20 for row in random.integers(0, 1 << 60, num_rows)])
    return pa.table(
        {"session_id": random.integers(0, 99, num_rows), "ts": np.arange(num_rows), "ids": lists}
    )


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "src").mkdir()
    for name in "ab":
        pq.write_table(good(), tmp_path / "src" / f"{name}.parquet", write_page_checksum=True)
    return tmp_path / "src"


def failure(source: Path, **options: object) -> str:
    """The error; nothing is left beside the source then."""
    target = source.parent / "dst"
    with pytest.raises(DataError) as error:
        cluster(ClusterOptions(source, target, **options))  # type: ignore[arg-type]
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    return str(error.value)


@pytest.mark.parametrize("left", [0, 3, 1000, -9])
def test_a_truncated_file(source, left):
    path = source / "b.parquet"
    path.write_bytes(path.read_bytes()[:left])
    assert str(path) in failure(source)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_a_flipped_bit_in_a_page(source, share):
    path = source / "b.parquet"
    data = bytearray(path.read_bytes())
    metadata = pq.read_metadata(path)
    ends = [
        metadata.row_group(0).column(index).total_compressed_size
        for index in range(metadata.num_columns)
    ]
    data[int(sum(ends) * share)] ^= 4
    path.write_bytes(bytes(data))
    assert str(path) in failure(source)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("session_id", None, "column 'session_id': null"),
        ("ts", None, "column 'ts': null"),
        ("ids", None, "column 'ids': the list is null"),
        ("ids", [1, None], "column 'ids': a null in the list"),
    ],
)
def test_nulls_by_file_and_row(source, column, value, message):
    path, table = source / "b.parquet", good()
    values = table[column].to_pylist()
    values[1234] = value
    index = table.schema.get_field_index(column)
    pq.write_table(table.set_column(index, column, pa.array(values, table[column].type)), path)
    assert f"{path}: row 1234 (from 0), {message}" in failure(source)


def test_null_lists_become_empty_where_asked(source):
    lists = pa.array([None] * ROWS, pa.list_(pa.int64()))
    for path in source.iterdir():
        pq.write_table(good().set_column(2, "ids", lists), path)
    cluster(ClusterOptions(source, source.parent / "dst", nulls="empty"))
    assert set(map(tuple, pq.read_table(source.parent / "dst")["ids"].to_pylist())) == {()}


def test_types_that_cannot_be_sorted(source):
    table = good()
    for path in source.iterdir():
        pq.write_table(table.set_column(0, "session_id", table["ids"]), path)
    assert "column 'session_id': session ids are of type list" in failure(source)
    for path in source.iterdir():
        pq.write_table(table.set_column(1, "ts", table["session_id"].cast(pa.string())), path)
    assert "column 'ts' is string" in failure(source)
    message = failure(source, session="ts", timestamp="ts")
    assert "a.parquet: 'ts' cannot be both the session and the time" in message


def test_a_time_that_is_no_number(source):
    times = np.arange(float(ROWS))
    times[77] = np.nan
    for path in source.iterdir():
        pq.write_table(good().set_column(1, "ts", pa.array(times)), path)
    assert "a.parquet: row 77 (from 0), column 'ts': NaN" in failure(source)


def test_a_session_that_is_no_whole_number(source):
    for path in source.iterdir():
        pq.write_table(good().set_column(0, "session_id", pa.array(np.arange(ROWS) / 2)), path)
    assert "column 'session_id': numeric session ids must be whole" in failure(source)


def test_no_rows(source):
    for path in source.iterdir():
        pq.write_table(good(0), path)
    assert "no row to write; it has none" in failure(source)


def test_a_full_disk(source):
    """Files may be as large as a little more than one of a run's; Linux's way to fill one up."""
    script = (
        "import resource, signal; from pathlib import Path\n"
        "from recd_plugin_recd.cluster.job import ClusterOptions, cluster\n"
        "from recd_plugins.runtime.errors import DataError\n"
        # What is compiled goes to a cache on disk too: it is there after this.
        "cluster(ClusterOptions(Path('src'), Path('before')))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, {resource.RLIM_INFINITY}))\n"
        "try:\n"
        "    cluster(ClusterOptions(Path('src'), Path('dst')))\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    done = forked.run(
        [sys.executable, "-c", script],
        cwd=source.parent,
    )
    assert "cannot be" in done.stdout, done.stderr
    assert sorted(path.name for path in source.parent.iterdir()) == ["before", "src"]


def test_an_engine_that_is_missing_leaves_nothing(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(SetupError, match="needs pyspark"):
        cluster(ClusterOptions(source, source.parent / "dst", engine="spark"))
    assert [path.name for path in source.parent.iterdir()] == [source.name]

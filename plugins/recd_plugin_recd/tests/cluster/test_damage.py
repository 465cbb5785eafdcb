"""Wrong and damaged input, and places that cannot be written: one error, nothing half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.cluster.job import ClusterOptions, cluster
from recd_plugins.runtime.errors import DataError

ROWS = 3000


def good(**columns: Any) -> pa.Table:
    random = np.random.default_rng(0)
    lists = pa.array([[row] * 20 for row in random.integers(0, 1 << 60, ROWS)])
    sessions = pa.array(random.integers(0, 99, ROWS))
    return pa.table({"session_id": sessions, "ts": np.arange(ROWS), "ids": lists, **columns})


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "src").mkdir()
    for name in "ab":
        pq.write_table(good(), tmp_path / "src" / f"{name}.parquet", write_page_checksum=True)
    return tmp_path / "src"


def failure(source: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        cluster(ClusterOptions(source, source.parent / "dst", **options))
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    return str(error.value)


@pytest.mark.parametrize("damage", [0, 3, -9, 0.01, 0.5, 0.9])
def test_a_file_that_is_cut_or_has_a_flipped_bit(source, damage):
    path = source / "b.parquet"
    data = bytearray(path.read_bytes())
    if isinstance(damage, int):
        data = data[:damage]
    else:
        group = pq.read_metadata(path).row_group(0)
        sizes = [group.column(index).total_compressed_size for index in range(group.num_columns)]
        data[int(sum(sizes) * damage)] ^= 4
    path.write_bytes(bytes(data))
    assert str(path) in failure(source)


def changed(column: str, value: Any) -> pa.Table:
    values = good()[column].to_pylist()
    values[1234] = value
    return good(**{column: pa.array(values)})


LISTS, TIMES = good()["ids"], np.arange(float(ROWS))
REFUSALS = {
    "column 'session_id' is null": changed("session_id", None),
    "column 'ts' is null": changed("ts", None),
    "column 'ids': the list is null": changed("ids", None),
    "column 'ids': the list contains a null": changed("ids", [1, None]),
    "column 'ts' is NaN": good(ts=np.where(TIMES == 1234, np.nan, TIMES)),
    "column 'session_id': session ids have the type list": good(session_id=LISTS),
    "time column 'ts' has the type string": good(ts=pa.array(TIMES).cast(pa.string())),
    "column 'session_id': session ids must be whole": good(session_id=TIMES / 2),
    "no rows to write": good().slice(0, 0),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_input_that_cannot_be_sorted_is_named(source, message):
    table = REFUSALS[message]
    for path in source.iterdir():
        pq.write_table(table, path)
    found = failure(source)
    assert message in found
    if message.endswith(("is null", "NaN", "contains a null")):
        assert f"a.parquet: row 1234 (from 0), {message}" in found


def test_null_lists_become_empty_where_asked(source):
    for path in source.iterdir():
        pq.write_table(changed("ids", None), path)
    cluster(ClusterOptions(source, source.parent / "dst", nulls="empty"))
    assert pq.read_table(source.parent / "dst")["ids"].to_pylist().count([]) == 2

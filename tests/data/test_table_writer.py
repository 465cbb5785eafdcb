import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugins.data.list_dict import is_list_dict, to_lists
from recd_plugins.data.parquet import read_footers
from recd_plugins.data.table_writer import TableWriter
from recd_plugins.interfaces.rows import SessionKeys
from recd_plugins.runtime.errors import DataError

KEYS = SessionKeys("session_id", "ts")
IDS = pa.list_(pa.int64())


def table(sessions: list[int], **columns) -> pa.RecordBatch:
    """One row after the other; ``history`` is the same for a session, ``item`` never."""
    return pa.RecordBatch.from_pydict(
        {
            "session_id": pa.array(sessions, pa.int64()),
            "ts": pa.array(range(len(sessions)), pa.int64()),
            "item": pa.array([[i] for i in range(len(sessions))], IDS),
            "history": pa.array([list(range(s, s + 5 * (s % 3))) for s in sessions], IDS),
            "price": pa.array([s / 2 for s in sessions], pa.float32()),
            **columns,
        }
    )


def write(path, batch, size=7, **options):
    with TableWriter(path, batch.schema, **{"keys": KEYS, **options}) as writer:
        for start in range(0, batch.num_rows, size):
            writer.write(batch.slice(start, size))
    return writer


def groups(path) -> list[int]:
    metadata = pq.read_metadata(path)
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def decoded(path) -> dict[str, list]:
    found = pq.read_table(path)
    packed = [field.name for field in found.schema if is_list_dict(field)]
    lists = {name: to_lists(found[name].combine_chunks()).to_pylist() for name in packed}
    return {**found.to_pydict(), **lists}


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("sessions", "expected"),
    [
        ([1] * 4 + [2] * 4 + [3] * 4, [8, 4]),
        ([1] * 4 + [2] * 5 + [3] * 4, [9, 4]),
        ([1] * 4 + [2] * 7, [4, 7]),
        ([1] * 10 + [2], [10, 1]),
        ([1] * 25 + [2] * 5, [10, 10, 10]),  # too long a session is cut, and its end fills up
        ([1], [1]),
    ],
)
def test_row_groups_end_where_sessions_do(tmp_path, size, sessions, expected):
    batch = table(sessions)
    write(tmp_path / "t.parquet", batch, size, row_group_rows=10)
    assert groups(tmp_path / "t.parquet") == expected
    assert decoded(tmp_path / "t.parquet") == batch.to_pydict()


def test_without_keys_row_groups_are_full_and_there_are_no_statistics(tmp_path):
    write(tmp_path / "t.parquet", table([1] * 4 + [2] * 7), row_group_rows=5, keys=None)
    assert groups(tmp_path / "t.parquet") == [5, 5, 1]
    assert read_footers([tmp_path / "t.parquet"]) is None


def test_features_that_hardly_repeat_stay_lists(tmp_path):
    batch = table([s for s in range(10) for _ in range(6)])
    writer = write(tmp_path / "t.parquet", batch, layout="list_dict", row_group_rows=20)
    assert writer.layouts == {"history": "list_dict", "item": "list"}
    assert decoded(tmp_path / "t.parquet") == batch.to_pydict()
    column = pq.read_metadata(tmp_path / "t.parquet").row_group(0).column(3)
    assert "RLE_DICTIONARY" in column.encodings


def test_either_layout_can_be_written_from_either(tmp_path):
    batch = table([s for s in range(10) for _ in range(6)])
    write(tmp_path / "a.parquet", batch, layout="list_dict")
    stored = pq.read_table(tmp_path / "a.parquet").combine_chunks().to_batches()[0]
    writer = write(tmp_path / "b.parquet", stored, layout={"item": "list_dict"})
    assert writer.layouts == {"history": "list", "item": "list_dict"}
    assert decoded(tmp_path / "b.parquet") == batch.to_pydict()


def test_the_footer_has_metadata_and_statistics(tmp_path):
    batch = table([1] * 4 + [2] * 4).replace_schema_metadata({b"made.by": b"us"})
    write(tmp_path / "t.parquet", batch, metadata={b"more": b"x"}, row_group_rows=3)
    metadata = pq.read_metadata(tmp_path / "t.parquet").metadata
    assert (metadata[b"made.by"], metadata[b"more"]) == (b"us", b"x")
    statistics = read_footers([tmp_path / "t.parquet"])
    assert (statistics.rows, statistics.sessions) == (8, 2)
    assert statistics.features["history"].unchanged_rows == 6
    assert json.loads(metadata[b"recd.statistics"])


def test_nulls_are_named_or_become_empty(tmp_path):
    history = pa.array([[1], [2], [3], None, [4]], IDS)
    batch = table([1, 1, 2, 2, 2], history=history)
    path = tmp_path / "t.parquet"
    message = r"t\.parquet: row 3 .*'history': the list is null.*--nulls empty"
    with pytest.raises(DataError, match=message):
        write(path, batch, row_group_rows=2)
    assert list(tmp_path.iterdir()) == []
    write(path, batch, nulls="empty", layout="list_dict")
    assert decoded(path)["history"] == [[1], [2], [3], [], [4]]
    inside = table([1, 1, 2, 2, 2], history=pa.array([[1], [2], [3], [4, None], [4]], IDS))
    with pytest.raises(DataError, match=r"t\.parquet: row 3 .*'history'.*the list contains a null"):
        write(path, inside, nulls="empty")


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("the former file")
    with (
        pytest.raises(ZeroDivisionError),
        TableWriter(path, table([1]).schema, keys=KEYS, row_group_rows=10) as writer,
    ):
        _write_and_fail(writer)
    assert [found.name for found in tmp_path.iterdir()] == ["t.parquet"]
    assert path.read_text() == "the former file"


def _write_and_fail(writer):
    writer.write(table([1] * 100))
    raise ZeroDivisionError

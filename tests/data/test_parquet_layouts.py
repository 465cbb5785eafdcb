"""Tables of Parquet files in either layout, or in forms that readers take for the same."""

import pyarrow as pa
import pytest

from recd_plugins.data.arrow import sparse_column
from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.reader import Piece
from recd_plugins.data.table_writer import TableWriter
from recd_plugins.interfaces.rows import SessionKeys
from recd_plugins.runtime.errors import DataError

IDS = pa.list_(pa.int64())
LISTS = [[1, 2], [1, 2], [], [3], [3]] * 4
ROWS = pa.record_batch({"session_id": list(range(20)), "ts": list(range(20)), "seen": LISTS})


def write(path, layout):
    keys = SessionKeys("session_id", "ts")
    with TableWriter(
        path, ROWS.schema, keys=keys, layout={"seen": layout}, row_group_rows=8
    ) as writer:
        writer.write(ROWS)


def read(table: ParquetTable) -> list[list[int]]:
    found = []
    for rows in table.read((Piece(unit, 0, unit.num_rows) for unit in table.units), table.schema):
        ids, offsets = sparse_column(rows, "seen")
        found += [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(rows))]
    return found


def test_list_dict_is_handed_out_as_a_dictionary(tmp_path):
    write(tmp_path / "a.parquet", "list_dict")
    table = ParquetTable(tmp_path)
    assert table.schema.field("seen").type == pa.dictionary(pa.int32(), pa.binary())
    assert read(table) == LISTS


def test_layouts_do_not_mix(tmp_path):
    write(tmp_path / "a.parquet", "list")
    write(tmp_path / "b.parquet", "list_dict")
    with pytest.raises(DataError, match=r"seen is list<int64> in .*a\.parquet and list_dict in"):
        ParquetTable(tmp_path)

"""Times in 96 bits, as Spark writes them: those that Arrow's nanoseconds have, or none."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.read_plan import Piece
from recd_plugins.data.row_groups import int96_columns
from recd_plugins.errors import DataError

AT = datetime(2026, 5, 1, 10, 30)


def write(path: Path, last: datetime) -> ParquetTable:
    columns = {
        "a.b": pa.array([AT, None, AT], pa.timestamp("us")),
        "until": pa.array([AT, None, last], pa.timestamp("us")),
        "deep": pa.array([[{"at": AT}], None, [{"at": last}]]),
        "n": [1, 2, 3],
    }
    options = {"use_deprecated_int96_timestamps": True, "row_group_size": 2}
    pq.write_table(pa.table(columns), path, **options)
    assert int96_columns(pq.read_metadata(path)) == ["a.b", "until", "deep"]
    return ParquetTable(path)


def read(table: ParquetTable, *names: str) -> list[dict]:
    schema = pa.schema([table.schema.field(name) for name in names or table.schema.names])
    pieces = (Piece(unit, 0, unit.num_rows) for unit in table.units)
    return [row for rows in table.read(pieces, schema) for row in rows.data.to_pylist()]


def test_times_are_read_as_they_are(tmp_path):
    row = {"a.b": AT, "until": AT, "deep": [{"at": AT}], "n": 3}
    assert read(write(tmp_path / "t.parquet", AT))[-1] == row


def test_a_time_that_would_become_another_one_is_refused(tmp_path):
    table = write(tmp_path / "t.parquet", datetime(9999, 12, 31))
    for name in ("until", "deep"):
        said = rf"t.parquet: row group 1, column {name}: .* after 2262 is stored as INT96, .*MICROS"
        with pytest.raises(DataError, match=said):
            read(table, "n", name)
    assert [row["n"] for row in read(table, "n", "a.b")] == [1, 2, 3]

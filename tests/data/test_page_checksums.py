"""A flipped bit in a page of a table that is written here is noticed, or changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.reader import Piece
from recd_plugins.data.table_writer import TableWriter
from recd_plugins.interfaces import SessionKeys
from recd_plugins.runtime.errors import DataError

NUM_ROWS = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    number = np.arange(NUM_ROWS)
    rows = pa.record_batch(
        {
            "session_id": number // 4,
            "ts": number,
            "price": number / 7,
            "seen": pa.array([[each // 4, 9] for each in number], pa.list_(pa.int64())),
            "item": pa.array([[each] for each in number], pa.list_(pa.int64())),
        }
    )
    made = tmp_path / "t.parquet"
    keys = SessionKeys("session_id", "ts")
    with TableWriter(
        made, rows.schema, keys=keys, layout={"seen": "list_dict", "item": "list"}
    ) as out:
        out.write(rows)
    return made


def read(path: Path) -> pa.Table:
    table = ParquetTable(path)
    rows = table.read((Piece(unit, 0, unit.num_rows) for unit in table.units), table.schema)
    return pa.Table.from_batches([each.data for each in rows])


def pages(path: Path) -> range:
    """The bytes of all pages, headers included."""
    group = pq.read_metadata(path).row_group(0)
    last = group.column(group.num_columns - 1)
    return range(4, last.data_page_offset + last.total_compressed_size)


def test_a_flip_anywhere_in_the_pages(path: Path) -> None:
    written, expected = path.read_bytes(), read(path)
    noticed: list[str] = []
    for byte in pages(path):
        damaged = bytearray(written)
        damaged[byte] ^= 1 << (byte % 8)
        path.write_bytes(damaged)
        try:
            # What a header says for nobody to read may change.
            assert read(path).equals(expected), byte
        except DataError as error:
            noticed.append(str(error))
    assert len(noticed) > 0.7 * len(pages(path))
    assert all("row group 0 cannot be read" in each or "damaged" in each for each in noticed)


def test_a_dictionary_that_says_it_is_shorter(path: Path) -> None:
    """Its header has no checksum, and its codes are those of rows."""
    written = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(3).dictionary_page_offset
    # Thrift, of 3 values and encoding PLAIN: field 1 and 2, 32 bits each, zigzag.
    at = written.index(b"\x15\x06\x15\x00", start)
    written[at + 1] = 2 * 2
    path.write_bytes(written)
    with pytest.raises(DataError, match="column seen has a code without a value"):
        read(path)

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.storage.conftest import table

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.reader import Piece
from recd_plugins.data.table_writer import TableWriter
from recd_plugins.interfaces import Reader, Rows, SessionKeys
from recd_plugins.runtime.errors import DataError


def read(opened: ParquetTable) -> Generator[Rows, None, None]:
    pieces = (Piece(unit, 0, unit.num_rows) for unit in opened.units)
    return opened.read(pieces, opened.schema)


def write(path: Path, *, seen: Literal["list", "list_dict"] = "list_dict") -> None:
    number = np.arange(12)
    columns = {
        "session_id": number // 4,
        "ts": number,
        "price": number / 7,
        "seen": pa.array([[each // 4, 9] for each in number], pa.list_(pa.int64())),
        "item": pa.array([[each] for each in number], pa.list_(pa.int64())),
    }
    rows, keys = pa.record_batch(columns), SessionKeys("session_id", "ts")
    with TableWriter(path, rows.schema, keys=keys, layout={"seen": seen, "item": "list"}) as out:
        out.write(rows)


def pages(path: Path) -> range:
    group = pq.read_metadata(path).row_group(0)
    last = group.column(group.num_columns - 1)
    return range(4, last.data_page_offset + last.total_compressed_size)


def test_a_flip_anywhere_in_the_pages_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    def content() -> pa.Table:
        return pa.Table.from_batches([each.data for each in read(ParquetTable(path))])

    path = tmp_path / "t.parquet"
    write(path)
    written, expected = path.read_bytes(), content()
    noticed: list[str] = []
    sample = pages(path)[::4]
    for byte in sample:
        damaged = bytearray(written)
        damaged[byte] ^= 1 << (byte % 8)
        path.write_bytes(damaged)
        try:
            assert content().equals(expected), byte
        except DataError as error:
            noticed.append(str(error))
    assert len(noticed) > 0.7 * len(sample)
    assert all("row group 0 cannot be read" in each or "damaged" in each for each in noticed)


def test_layouts_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", seen="list")
    write(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"seen. is list<int64> in .*a\.parquet, but list_dict in"):
        ParquetTable(tmp_path)


def content(first: int, *, statistics: bool = False) -> bytes:
    sink = pa.BufferOutputStream()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": statistics}
    pq.write_table(table(range(first, first + 40)), sink, row_group_size=20, **options)
    return bytes(sink.getvalue().to_pybytes())


def rename_over(path: Path, new: bytes) -> None:
    other = path.with_name("new")
    other.write_bytes(new)
    shutil.copystat(path, other)
    other.rename(path)


def write_over(path: Path, new: bytes, later: int = 1) -> None:
    before = path.stat()
    path.write_bytes(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))


@pytest.mark.parametrize(
    ("replace", "change", "statistics"),
    [
        (rename_over, r"its inode was \d+ and is \d+", False),
        (write_over, r"its time of change was \d+ and is \d+", False),
        (partial(write_over, later=0), "its footer was [0-9a-f]{16} and is [0-9a-f]{16}", True),
    ],
)
def test_a_file_of_equal_size_is_noticed(
    tmp_path: Path, replace: Callable[[Path, bytes], None], change: str, statistics: bool
) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content(300, statistics=statistics))
    opened = ParquetTable(path)
    replace(path, content(600, statistics=statistics))
    found = rf"{re.escape(str(path))} was replaced while it was in use \({change}\)\. Start"
    with pytest.raises(DataError, match=found):
        list(read(opened))


def test_a_file_that_is_written_over_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content(300))
    with closing(read(ParquetTable(path))) as rows:
        next(rows)
        write_over(path, content(600))
        with pytest.raises(DataError, match=r"t.parquet was replaced .*its time of change was"):
            next(rows)


def reader(path: Path) -> Reader:
    data = SessionParquet(SessionParquet.Options.model_validate({"path": path, "prefetch": 0}))
    return data.reader(rank=0, world_size=1, batch_size=10, split="train")


def test_a_position_is_of_these_files_and_may_move_with_them(tmp_path: Path) -> None:
    path, moved = tmp_path / "t.parquet", tmp_path / "moved" / "t.parquet"
    path.write_bytes(content(300, statistics=True))
    state = reader(path).state_dict()
    moved.parent.mkdir()
    shutil.copyfile(path, moved)
    reader(moved).load_state_dict(state)
    path.write_bytes(content(600, statistics=True))
    with pytest.raises(DataError, match=r"belongs to other data than .*t.parquet: 'files' was"):
        reader(path).load_state_dict(state)

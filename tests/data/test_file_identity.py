"""A Parquet file in the place of another one of equal size is noticed, whatever tells them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.storage.conftest import table

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.reader import Piece
from recd_plugins.interfaces import Reader, Rows
from recd_plugins.runtime.errors import DataError


def content(first: int, *, statistics: bool = False) -> bytes:
    """A file of 40 rows; without statistics all footers are equal."""
    sink = pa.BufferOutputStream()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": statistics}
    pq.write_table(table(range(first, first + 40)), sink, row_group_size=20, **options)
    return bytes(sink.getvalue().to_pybytes())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "t.parquet"
    made.write_bytes(content(300))
    return made


def rename_over(path: Path, new: bytes) -> None:
    other = path.with_name("new")
    other.write_bytes(new)
    shutil.copystat(path, other)
    other.rename(path)


def write_over(path: Path, new: bytes) -> None:
    before = path.stat()
    path.write_bytes(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def write_over_unseen(path: Path, new: bytes) -> None:
    before = path.stat()
    path.write_bytes(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("replace", "change", "statistics"),
    [
        (rename_over, r"its inode was \d+ and is \d+", False),
        (write_over, r"its time of change was \d+ and is \d+", False),
        (write_over_unseen, r"its footer was [0-9a-f]{16} and is [0-9a-f]{16}", True),
    ],
)
def test_a_file_of_equal_size(
    path: Path, replace: Callable[[Path, bytes], None], change: str, statistics: bool
) -> None:
    path.write_bytes(content(300, statistics=statistics))
    size = path.stat().st_size
    opened = ParquetTable(path)
    replace(path, content(600, statistics=statistics))
    assert path.stat().st_size == size
    found = rf"{re.escape(str(path))} was replaced while it was in use \({change}\); start anew"
    with pytest.raises(DataError, match=found):
        list(read(opened))


def test_a_file_that_is_written_over_while_it_is_read(path: Path) -> None:
    with closing(read(ParquetTable(path))) as rows:
        next(rows)
        write_over(path, content(600))
        with pytest.raises(DataError, match=r"t.parquet was replaced .*its time of change was"):
            next(rows)


def test_a_position_is_of_these_files_and_may_move_with_them(path: Path, tmp_path: Path) -> None:
    path.write_bytes(content(300, statistics=True))
    state = reader(path).state_dict()
    moved = tmp_path / "moved" / path.name
    moved.parent.mkdir()
    shutil.copyfile(path, moved)
    reader(moved).load_state_dict(state)
    path.write_bytes(content(600, statistics=True))
    with pytest.raises(DataError, match=r"belongs to other data than .*t.parquet: files was"):
        reader(path).load_state_dict(state)


def read(opened: ParquetTable) -> Generator[Rows, None, None]:
    pieces = (Piece(unit, 0, unit.num_rows) for unit in opened.units)
    return opened.read(pieces, opened.schema)


def reader(path: Path, batch_size: int = 10) -> Reader:
    data = SessionParquet(SessionParquet.Options.model_validate({"path": path, "prefetch": 0}))
    return data.reader(rank=0, world_size=1, batch_size=batch_size, split="train")

"""Reading columns together: pyarrow's rule, its bytes, and no others."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.storage.counted_files import CountedFiles, register
from tests.data.storage.counted_store import of_columns

from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.reader import Piece
from recd_plugins.data.row_groups import BufferedFile, ReadOptions, merge
from recd_plugins.data.storage import Location


@given(
    gaps=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12),
    hole=st.integers(0, 30),
    limit=st.integers(1, 100),
)
def test_requests_cover_what_is_asked_for_within_the_limits(gaps, hole, limit):
    ranges, place = [], 0
    for gap, size in gaps:
        ranges.append((place + gap, size))
        place += gap + size
    merged = merge(ranges, hole, limit)
    wanted = {byte for start, size in ranges for byte in range(start, start + size)}
    read = [byte for start, size in merged for byte in range(start, start + size)]
    assert wanted <= set(read)
    assert len(read) == len(set(read))
    # What nobody asked for is holes between neighbours, each within its limit.
    assert len(read) - len(wanted) <= hole * max(0, len(ranges) - len(merged))
    assert all(size <= limit or (start, size) in ranges for start, size in merged)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Ten columns of different sizes."""
    path = tmp_path_factory.mktemp("wide") / "t.parquet"
    columns = {
        f"c{index}": pa.array([[row * index] * index for row in range(400)], pa.list_(pa.int64()))
        for index in range(10)
    }
    pq.write_table(pa.table(columns), path, row_group_size=100, use_dictionary=False)
    return path


@pytest.mark.parametrize("hole", [0, 100, 1000, 8192])
@pytest.mark.parametrize("limit", [2000, 32 << 20])
def test_requests_are_those_of_pyarrow_at_the_same_limits(path, hole, limit):
    register()
    names = ["c1", "c3", "c4", "c7", "c9"]
    sizes = {str(path): path.stat().st_size}
    cache = pa.CacheOptions(hole_size_limit=hole, range_size_limit=limit)
    fragments = ds.ParquetFileFormat(
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(cache_options=cache)
    )
    counted = pafs.PyFileSystem(pafs.FSSpecHandler(CountedFiles()))
    fragment = fragments.make_fragment(str(path), counted)
    CountedFiles.taken()
    for group in range(4):
        fragment.subset(row_group_ids=[group]).to_table(columns=names, use_threads=False)
    theirs = of_columns(CountedFiles.taken(), sizes)
    table = ParquetTable(
        f"counted://{path}", options=ReadOptions(hole_size_limit=hole, range_size_limit=limit)
    )
    CountedFiles.taken()
    schema = pa.schema([table.schema.field(name) for name in names])
    rows = list(table.read((Piece(unit, 0, unit.num_rows) for unit in table.units), schema))
    ours = of_columns(CountedFiles.taken(), sizes)
    assert sorted((each.start, each.stop) for each in ours) == sorted(
        (each.start, each.stop) for each in theirs
    )
    assert pa.Table.from_batches([each.data for each in rows]) == pq.read_table(path, columns=names)


def test_it_reads_like_the_file_itself(path):
    content = path.read_bytes()
    source = pa.OSFile(str(path))
    with BufferedFile(source, ReadOptions(), is_local=True) as file:
        file.load([(100, 50), (9000, 10)])
        for start, size in ((100, 50), (110, 5), (149, 2), (9000, 10), (0, 20), (99, 3)):
            file.seek(start)
            assert file.read(size) == content[start : start + size]
        file.seek(-8, 2)
        assert file.read() == content[-8:]
        assert file.read_buffer(5).size == 0
    assert source.closed


def test_files_are_closed(path, monkeypatch):
    opened = []
    real = Location.open

    def noted(self):
        opened.append(real(self))
        return opened[-1]

    monkeypatch.setattr(Location, "open", noted)
    for options in (ReadOptions(), ReadOptions(pre_buffer=False)):
        table = ParquetTable(path, options=options)
        batches = table.read((Piece(unit, 0, 10) for unit in table.units), table.schema)
        next(batches)
        batches.close()
    assert len(opened) == 4
    assert all(file.closed for file in opened)

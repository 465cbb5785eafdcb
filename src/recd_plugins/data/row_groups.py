"""Reading Parquet row groups: work items, requests that span columns, and files that changed.

A split describes by itself which rows to read from where, as in Meta's ingestion (arXiv
2108.09373): any process on any machine can read it.
"""

from __future__ import annotations

import hashlib
import io
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from recd_plugins.data.list_dict import decoded_field, is_list_dict
from recd_plugins.data.row_filter import Condition, RowFilter
from recd_plugins.data.storage import Location
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.text import read_bytes

#: A range of a file: its first byte, and how many.
Range = tuple[int, int]

_Bytes = Annotated[
    int, BeforeValidator(lambda given: read_bytes(given) if isinstance(given, str) else given)
]
# Requests to an object store, whose answers take longer than their bytes.
_REQUESTS_AT_ONCE = 8
# Rows decoded at once: more costs page faults, less costs calls.
_DECODE_ROWS = 2048
# With dictionaries, which are built anew for every batch: whole row groups, if they are not huge.
_DECODE_DICTIONARY_ROWS = 16_384
# Of names in a damaged footer pyarrow raises the last.
_UNREADABLE = (pa.ArrowException, OSError, UnicodeError)
# Bytes at a file's end that are read first, as pyarrow does; and those behind a footer.
_TAIL, _ENDING = 1 << 16, 8
_FOOTER = "footer"


class ReadOptions(BaseModel):
    """How the columns of a row group are read; the limits mean what pyarrow.CacheOptions say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pre_buffer: bool = Field(
        default=True,
        description="Read columns that stand near each other by one request; false reads each.",
    )
    hole_size_limit: _Bytes = Field(
        default=8192, ge=0, description="Bytes between two columns that are read along at most."
    )
    range_size_limit: _Bytes = Field(
        default=32 << 20,
        gt=0,
        description="Bytes of one request at most, unless one column has more.",
    )


@dataclass(frozen=True)
class RowGroup:
    """Rows of one row group. It can be pickled.

    Attributes:
        file: the file.
        group: its index in the file.
        first_row: 0-based row of the file with which it begins.
        group_rows: its rows.
        num_rows: the number of them that ``where`` keeps.
        ranges: which of these are read, pairs of the first and how many, ascending.
        columns: names and types of what is read, ``list_dict`` as dictionaries.
        where: conditions that all have to hold.
        options: how columns are read.
    """

    file: Location
    group: int
    first_row: int
    group_rows: int
    num_rows: int
    ranges: tuple[tuple[int, int], ...]
    columns: pa.Schema
    where: tuple[Condition, ...] = ()
    options: ReadOptions = field(default_factory=ReadOptions)


def read_splits(splits: Iterable[RowGroup]) -> Generator[Rows, None, None]:
    """Read splits in their order, in batches of any size from one range each.

    Consecutive splits of one file share an open file, which nobody else uses.
    """
    for (location, options), run in groupby(splits, key=lambda split: (split.file, split.options)):
        first = next(run)
        with open_file(location, first.columns, options) as file:
            for split in chain([first], run):
                yield from _read(file, split)


def merge(ranges: Iterable[Range], hole_size_limit: int, range_size_limit: int) -> list[Range]:
    """Return the requests that cover ``ranges``, in order, by pyarrow's rule for pre-buffering.

    Two neighbours become one if at most ``hole_size_limit`` bytes are between them and both
    together are at most ``range_size_limit``.
    """
    merged: list[Range] = []
    for start, size in sorted(each for each in ranges if each[1]):
        if merged:
            first, length = merged[-1]
            stop = max(first + length, start + size)
            near = start - (first + length) <= hole_size_limit
            if near and stop - first <= range_size_limit:
                merged[-1] = (first, stop - first)
                continue
        merged.append((start, size))
    return merged


def column_ranges(group: pq.RowGroupMetaData, columns: Iterable[str]) -> list[Range]:
    """Return the ranges of the chunks of top-level ``columns`` in the file."""
    wanted = set(columns)
    found = []
    for index in range(group.num_columns):
        chunk = group.column(index)
        # Names may have dots of their own: the top level is some of the first parts.
        parts = chunk.path_in_schema.split(".")
        if any(".".join(parts[:stop]) in wanted for stop in range(1, len(parts) + 1)):
            dictionary = chunk.dictionary_page_offset
            start = min(chunk.data_page_offset, dictionary or chunk.data_page_offset)
            found.append((start, chunk.total_compressed_size))
    return found


class BufferedFile(io.RawIOBase):
    """A file with some ranges in memory; the rest is read on demand.

    pyarrow takes limits for pre-buffering only through dataset fragments, which decode whole row
    groups: slower for long lists, and in more memory. This gives its reader of batches the bytes
    instead.
    """

    def __init__(self, source: pa.NativeFile, options: ReadOptions, *, is_local: bool) -> None:
        self._source = source
        self._options = options
        self._is_local = is_local
        self._size = source.size()
        self._position = 0
        self._starts: list[int] = []
        self._buffers: list[pa.Buffer] = []

    def load(self, ranges: Iterable[Range]) -> None:
        """Take these ranges into memory in place of the former ones."""
        self._starts, self._buffers = [], []
        limits = self._options
        merged = merge(ranges, limits.hole_size_limit, limits.range_size_limit)
        if self._is_local or len(merged) < 2:
            buffers = [self._read_at(each) for each in merged]
        else:
            with ThreadPoolExecutor(min(len(merged), _REQUESTS_AT_ONCE)) as threads:
                buffers = list(threads.map(self._read_at, merged))
        self._starts, self._buffers = [start for start, _ in merged], buffers

    def read_buffer(self, size: int = -1) -> Any:
        """Return the next bytes, without a copy if they are in memory."""
        size = max(0, self._size - self._position if size < 0 else size)
        index = bisect_right(self._starts, self._position) - 1
        found = None
        if index >= 0:
            buffer, skip = self._buffers[index], self._position - self._starts[index]
            if skip + size <= buffer.size:
                found = buffer.slice(skip, size)
        if found is None:
            found = self._read_at((self._position, size))
        self._position += found.size
        return found

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size).to_pybytes())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._starts, self._buffers = [], []
        self._source.close()
        super().close()

    def _read_at(self, wanted: Range) -> pa.Buffer:
        start, size = wanted
        return pa.py_buffer(self._source.read_at(size, start))


def look_at(location: Location, source: pa.NativeFile) -> tuple[pq.FileMetaData, Location]:
    """Return the footer of an open file, and ``location`` with what identifies its content."""
    seen = location.state_of(source)
    _check_same(location, dict(seen))
    size = source.size()
    tail: bytes = source.read_at(min(size, _TAIL), max(0, size - _TAIL))
    length = int.from_bytes(tail[-_ENDING:-4], "little") + _ENDING
    if len(tail) < length <= size:
        tail = source.read_at(length, size - length)
    footer = tail[-length:]
    metadata = pq.read_metadata(pa.BufferReader(footer))
    seen = (*seen, (_FOOTER, hashlib.sha256(footer).hexdigest()[:16]))
    _check_same(location, dict(seen))
    return metadata, replace(location, seen=seen)


def footer_digest(location: Location) -> str:
    """Return the digest of the footer of a file that ``look_at`` saw, 16 hex digits."""
    return str(dict(location.seen)[_FOOTER])


def _replaced(location: Location, what: str = "") -> DataError:
    return DataError(f"{location} was replaced while it was in use{what}; start anew")


def _check_same(location: Location, now: dict[str, str | int]) -> None:
    """Refuse a file that is not the one that ``look_at`` saw."""
    before = dict(location.seen)
    if not before and location.size is not None:
        before = {"size": location.size}
    for name, value in now.items():
        if (was := before.get(name, value)) != value:
            raise _replaced(location, f" (its {name} was {was} and is {value})")


@contextmanager
def open_file(location: Location, columns: pa.Schema, options: ReadOptions) -> Iterator[OpenFile]:
    """A Parquet file to read row group by row group.

    Whether it is still the file that ``location`` was made of is checked when it is opened, and
    after reading: a local file after each row group, an object at the end, as the requests that
    read it may have met different ones.
    """
    try:
        with location.told():
            source = location.open()
            file = OpenFile(location, source, columns, options)
    except _UNREADABLE as error:
        raise DataError(f"{location}: no readable Parquet file: {error}") from error
    with closing(file):
        yield file
        if location.local is None:
            with location.told(), location.open() as again:
                _check_same(file.location, dict(location.state_of(again)))
        else:
            file.check_unchanged()


class OpenFile:
    """A Parquet file that ``open_file`` has opened."""

    def __init__(
        self, location: Location, source: pa.NativeFile, columns: pa.Schema, options: ReadOptions
    ) -> None:
        metadata, self.location = look_at(location, source)
        self._file = self._source = source
        self._buffered = None
        if options.pre_buffer:
            self._buffered = BufferedFile(source, options, is_local=location.local is not None)
            self._source = pa.PythonFile(self._buffered, mode="r")
        self.parquet = pq.ParquetFile(
            self._source,
            metadata=metadata,
            read_dictionary=[each.name for each in columns if is_list_dict(each)],
            page_checksum_verification=True,
            pre_buffer=False,
        )

    def batches(
        self, group: int, names: Sequence[str], num_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the columns ``names`` of a row group, ``num_rows`` at once, in file order."""
        try:
            with self.location.told():
                metadata = self.parquet.metadata
                if self._buffered is not None:
                    self._buffered.load(column_ranges(metadata.row_group(group), names))
                for batch in self.parquet.iter_batches(
                    num_rows, row_groups=[group], columns=list(names), use_threads=False
                ):
                    self._check_codes(group, batch)
                    yield batch
                self.check_unchanged()
        except _UNREADABLE as error:
            raise DataError(
                f"{self.location}: row group {group} cannot be read: {error}"
            ) from error

    def check_unchanged(self) -> None:
        """Refuse a local file that was written over since it was opened."""
        if self.location.local is not None:
            _check_same(self.location, dict(self.location.state_of(self._file)))

    def close(self) -> None:
        self.parquet.close(force=True)
        self._source.close()
        self._file.close()
        if self._buffered is not None:
            self._buffered.close()

    def _check_codes(self, group: int, batch: pa.RecordBatch) -> None:
        """Refuse codes without a value: no checksum guards the header of a dictionary page."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if pa.types.is_dictionary(column.type) and len(column):
                code = pc.max(column.indices).as_py()
                if code is not None and code >= len(column.dictionary):
                    raise DataError(
                        f"{self.location}: row group {group}: column {name} has a code without a "
                        "value; the table is damaged, write it anew"
                    )


def decoded_schema(metadata: pq.FileMetaData) -> pa.Schema:
    """Return the columns of a file as readers yield them."""
    return pa.schema([decoded_field(field) for field in metadata.schema.to_arrow_schema()])


def _read(file: OpenFile, split: RowGroup) -> Iterator[Rows]:
    metadata = file.parquet.metadata
    groups = metadata.num_row_groups
    num_rows = metadata.row_group(split.group).num_rows if split.group < groups else 0
    if num_rows != split.group_rows:
        what = f" (row group {split.group} had {split.group_rows} rows and has {num_rows})"
        raise _replaced(split.file, what)
    schema, names = split.columns, list(split.columns.names)
    row_filter = None
    if split.where:
        row_filter = RowFilter(split.where, decoded_schema(metadata), split.file)
        names += [name for name in row_filter.columns if name not in names]
    # Rows that the filter has kept so far, and rows of the row group.
    row, group_row = 0, 0
    stop = sum(split.ranges[-1])
    decoded = _DECODE_DICTIONARY_ROWS if any(map(is_list_dict, schema)) else _DECODE_ROWS
    with closing(file.batches(split.group, names, decoded)) as batches:
        for batch in batches:
            origin = Origin(str(split.file), split.first_row + group_row, batch.num_rows)
            group_row += batch.num_rows
            if row_filter is not None:
                kept = row_filter.kept(batch)
                if len(kept) < batch.num_rows:
                    batch, origin = batch.take(pa.array(kept)), _kept(origin, kept)
            for skip, num_rows in split.ranges:
                first = max(row, skip)
                last = min(row + batch.num_rows, skip + num_rows)
                if first < last:
                    data = batch.slice(first - row, last - first)
                    mine = origin.slice(first - row, last - first)
                    yield Rows(_cast(data, schema, mine), (mine,))
            row += batch.num_rows
            if row >= stop and group_row < split.group_rows:
                return
    if row != split.num_rows:
        what = f"{row} rows of row group {split.group} were read, {split.num_rows} were expected"
        raise _replaced(split.file, f", or it is damaged ({what})")


def _kept(origin: Origin, kept: np.ndarray) -> Origin:
    if not len(kept):
        return Origin(origin.path, origin.first_row, 0)
    rows = kept + origin.first_row
    first, last = int(rows[0]), int(rows[-1])
    adjacent = last - first + 1 == len(rows)
    return Origin(origin.path, first, len(rows), None if adjacent else pa.array(rows))


def _cast(data: pa.RecordBatch, schema: pa.Schema, origin: Origin) -> pa.RecordBatch:
    cast = []
    for wanted in schema:  # projection keeps the order of the file
        column = data.column(wanted.name)
        try:
            cast.append(column if column.type == wanted.type else column.cast(wanted.type))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{origin.path}: column {wanted.name}, rows {origin.first_row} to "
                f"{origin.row(origin.num_rows - 1)}: {error}"
            ) from error
    return pa.record_batch(cast, schema=schema)

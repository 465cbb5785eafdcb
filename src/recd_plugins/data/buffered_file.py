"""Reading stretches of a file together: fewer requests, for some bytes that nobody asked for."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from recd_plugins.byte_sizes import read_bytes

#: A stretch of a file: its first byte, and how many.
Range = tuple[int, int]

_Bytes = Annotated[
    int, BeforeValidator(lambda given: read_bytes(given) if isinstance(given, str) else given)
]
# Of an object store, whose answers take longer than their bytes.
_REQUESTS_AT_ONCE = 8


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


def merge(ranges: Iterable[Range], hole_size_limit: int, range_size_limit: int) -> list[Range]:
    """The requests that cover ``ranges``, in order.

    Two neighbours are read by one where at most ``hole_size_limit`` bytes are between them and
    both together are at most ``range_size_limit``: pyarrow's rule for pre-buffering.
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
    """Where the chunks of top-level ``columns`` lie in the file."""
    wanted = set(columns)
    found = []
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        # Names may have dots of their own: the top level is some of the first parts.
        parts = path.split(".")
        if any(".".join(parts[:stop]) in wanted for stop in range(1, len(parts) + 1)):
            dictionary = chunk.dictionary_page_offset
            start = min(chunk.data_page_offset, dictionary or chunk.data_page_offset)
            found.append((start, chunk.total_compressed_size))
    return found


class BufferedFile(io.RawIOBase):
    """A file of which some stretches are in memory; the rest is read where it is asked for.

    pyarrow takes limits for pre-buffering only through dataset fragments, which decode whole row
    groups: slower at lists where these are large, and in more memory. This gives its reader of
    batches the bytes instead.
    """

    def __init__(self, source: pa.NativeFile, options: ReadOptions, *, is_local: bool) -> None:
        self._source = source
        self._options = options
        self._is_local = is_local
        self._size = source.size()
        self._position = 0
        self._starts: list[int] = []
        self._stretches: list[pa.Buffer] = []

    def load(self, ranges: Iterable[Range]) -> None:
        """Take these stretches into memory in place of those before."""
        self._starts, self._stretches = [], []
        limits = self._options
        merged = merge(ranges, limits.hole_size_limit, limits.range_size_limit)
        if self._is_local or len(merged) < 2:
            stretches = [self._read_at(each) for each in merged]
        else:
            with ThreadPoolExecutor(min(len(merged), _REQUESTS_AT_ONCE)) as threads:
                stretches = list(threads.map(self._read_at, merged))
        self._starts = [start for start, _ in merged]
        self._stretches = stretches

    def read_buffer(self, size: int = -1) -> Any:
        """The next bytes, without a copy where they are in memory."""
        size = max(0, self._size - self._position if size < 0 else size)
        index = bisect_right(self._starts, self._position) - 1
        found = None
        if index >= 0:
            stretch, skip = self._stretches[index], self._position - self._starts[index]
            if skip + size <= stretch.size:
                found = stretch.slice(skip, size)
        if found is None:
            found = self._read_at((self._position, size))
        self._position += found.size
        return found

    def read(self, size: int = -1) -> bytes:
        """As ``read_buffer``, copied."""
        return bytes(self.read_buffer(size).to_pybytes())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The next byte."""
        return self._position

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Let go of the stretches and of the file."""
        self._starts, self._stretches = [], []
        self._source.close()
        super().close()

    def _read_at(self, stretch: Range) -> pa.Buffer:
        start, size = stretch
        return pa.py_buffer(self._source.read_at(size, start))

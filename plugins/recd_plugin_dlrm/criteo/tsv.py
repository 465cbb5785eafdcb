"""Parser, index and reader of Criteo's TSV files, plain or compressed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.days import (
    COLUMNS,
    DENSE,
    UNIT_ROWS,
    Day,
    DayRows,
    RawRows,
    Segment,
    even_starts,
)
from recd_plugins.api import DataError, Origin, file_utils, progress_bars

_TAB, _LINE_FEED, _RETURN, _MINUS = 9, 10, 13, 45
# More digits might overflow int64.
_MOST_DIGITS, _MOST_HEX_DIGITS = 18, 15
#: Value of each byte as a hexadecimal digit, or 255.
_HEX = np.full(256, 255, np.uint8)
_HEX[ord("0") : ord("9") + 1] = np.arange(10)
_HEX[ord("a") : ord("f") + 1] = _HEX[ord("A") : ord("F") + 1] = np.arange(10, 16)


@njit(cache=True, nogil=True)
def parse_lines(
    data: NDArray[np.uint8],
    start: int,
    stop: int,
    labels: NDArray[np.int8],
    dense: NDArray[np.int64],
    sparse: NDArray[np.int64],
    first: int,
) -> tuple[int, int, bool]:
    """Parse the TSV lines of ``data[start:stop]`` into rows ``first``, ... of the other arrays.

    Parsing stops at a malformed line, or when ``labels``, int8 ``[capacity]``, is full. ``dense``
    and ``sparse`` are int64 ``[13, capacity]`` and ``[26, capacity]``.

    Returns:
        The next row, the start of the next line, and whether that line is malformed.
    """
    row, position = first, start
    capacity = len(labels)
    while row < capacity and position < stop:
        at = position
        label = np.int64(data[at]) - 48
        if not 0 <= label <= 1 or data[at + 1] != _TAB:
            return row, position, True
        labels[row] = label
        at += 2
        for column in range(13):
            negative = data[at] == _MINUS
            at += negative
            begin = at
            number = np.int64(0)
            digit = np.int64(data[at]) - 48
            while 0 <= digit <= 9:
                number = number * 10 + digit
                at += 1
                digit = np.int64(data[at]) - 48
            digits = at - begin
            if data[at] != _TAB or digits > _MOST_DIGITS or (negative and digits == 0):
                return row, position, True
            dense[column, row] = -number if negative else number
            at += 1
        for column in range(26):
            begin = at
            number = np.int64(0)
            digit = np.int64(_HEX[data[at]])
            while digit < 16:
                number = (number << 4) | digit
                at += 1
                digit = np.int64(_HEX[data[at]])
            if at - begin > _MOST_HEX_DIGITS:
                return row, position, True
            sparse[column, row] = number
            if column < 25:
                if data[at] != _TAB:
                    return row, position, True
            else:
                if data[at] == _RETURN:
                    at += 1
                if data[at] != _LINE_FEED:
                    return row, position, True
            at += 1
        row += 1
        position = at
    return row, position, False


_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_CHUNK = 1 << 20  # bytes to decompress at a time
_REPLACED = "the file was replaced while it was in use. Run the command again."


def compression_of(path: Path) -> str | None:
    """Return ``gzip``, ``zstd`` or None, depending on the suffix of the file."""
    return _COMPRESSIONS.get(path.suffix)


class TsvStream:
    """Sequential reader of a TSV file, starting at byte ``offset``, which is line ``line``."""

    def __init__(
        self,
        path: Path,
        on_bytes: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        self._path = path
        self._on_bytes = on_bytes
        self._compression = compression_of(path)
        self.offset = 0
        self.line = 1
        self._source: Any = (
            pa.input_stream(str(path), compression=self._compression, buffer_size=_CHUNK)
            if self._compression
            else path.open("rb", buffering=0)
        )
        self._at = self._stop = 0
        self._set_data(b"")

    def read(self, most: int) -> RawRows:
        """Read the next rows, at most ``most``. At the end of the file, return zero rows.

        Raises:
            DataError: a line is malformed, or the file cannot be read.
        """
        labels = np.empty(most, np.int8)
        dense, sparse = np.empty((13, most), np.int64), np.empty((26, most), np.int64)
        row = 0
        while row < most and (self._at < self._stop or self._fill()):
            end, at, is_bad = parse_lines(
                self._array, self._at, self._stop, labels, dense, sparse, row
            )
            self.line += end - row
            row = int(end)
            if is_bad:
                after = self._data.index(b"\n", at) + 1
                line = self._data[at:after].rstrip(b"\r\n").decode("utf-8", "backslashreplace")
                raise DataError(
                    f"{self._path}:{self.line}: the line is malformed: {line[:60]!r}. Write the "
                    f"label (0 or 1), {len(DENSE)} integers and "
                    f"{len(COLUMNS) - len(DENSE) - 1} hexadecimal numbers, separated by tabs."
                )
            self.offset += at - self._at
            self._at = at
        return RawRows(labels[:row], list(dense[:, :row]), list(sparse[:, :row]))

    def seek(self, offset: int, line: int = 1) -> None:
        """Move to the start of line ``line`` at byte ``offset``; forward only if compressed."""
        if self._compression:
            while self.offset + len(self._data) - self._at < offset:
                self.offset += len(self._data) - self._at
                self._set_data(b"")
                if not self._fill():
                    raise DataError(f"{self._path}: {_REPLACED}")
            self._at += offset - self.offset
            self._stop = max(self._stop, self._at)
        else:
            self._source.seek(offset)
            self._set_data(b"")
        self.offset, self.line = offset, line

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def _set_data(self, data: bytes) -> None:
        """Use ``data`` as the next bytes to parse, up to the last complete line."""
        self._data, self._array = data, np.frombuffer(data, np.uint8)
        self._at, self._stop = 0, data.rfind(b"\n") + 1

    def _fill(self) -> bool:
        """Read bytes until they contain a complete line. Return False at the end of the file."""
        while True:
            try:
                chunk: bytes = self._source.read(_CHUNK)
            except OSError as error:
                raise DataError(
                    f"{self._path}: the file is truncated, damaged or has a wrong suffix: {error}. "
                    f"Lines up to {self.line} can be read. Download or write the file again."
                ) from error
            self._on_bytes(chunk)
            rest = self._data[self._at :]
            if not chunk and not rest:
                return False
            # The last line may lack a line feed.
            self._set_data(rest + (chunk or b"\n"))
            if self._stop:
                return True


_VERSION = 2


@dataclass(frozen=True)
class TsvIndex:
    """Byte offsets of every ``UNIT_ROWS``-th row of the decompressed file, and its CRC-32."""

    size: int
    mtime_ns: int
    num_rows: int
    checksum: int
    offsets: list[int]


def stamp(path: Path) -> tuple[int, int]:
    """Return the size and modification time of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def index_of(path: Path, cache: Path) -> TsvIndex:
    """Load the index of a TSV file from folder ``cache``, or build it by reading the file."""
    note = cache / f"{path.name}.index.json"
    size, mtime_ns = stamp(path)
    found = file_utils.read_note(note) or {}
    if (found.pop("version", None), found.pop("unit_rows", None)) == (_VERSION, UNIT_ROWS):
        index = TsvIndex(**found)
        if (index.size, index.mtime_ns) == (size, mtime_ns):
            return index
    checksum = 0

    def add(chunk: bytes) -> None:
        nonlocal checksum
        checksum = zlib.crc32(chunk, checksum)

    offsets, num_rows = [], 0
    with (
        progress_bars.row_progress(f"reading {path.name}", None) as progress,
        closing(TsvStream(path, add)) as stream,
    ):
        while True:
            offset = stream.offset
            if not (rows := len(stream.read(UNIT_ROWS))):
                break
            offsets.append(offset)
            num_rows += rows
            progress(rows)
    even_starts(path, num_rows)
    index = TsvIndex(size, mtime_ns, num_rows, checksum, offsets)
    file_utils.write_note(note, {"version": _VERSION, "unit_rows": UNIT_ROWS, **asdict(index)})
    return index


class TsvDay(Day):
    """A day in an indexed TSV file. A compressed file is always decompressed from its start."""

    def __init__(self, name: str, path: Path, index: TsvIndex) -> None:
        self.name = name
        self.can_jump = compression_of(path) is None
        self.num_rows = index.num_rows
        self.starts = even_starts(path, index.num_rows)
        self._path = path
        self._index = index

    def identity(self) -> list[Any]:
        return [self.name, self.num_rows, self._index.checksum]

    def read(self, segments: Iterable[Segment]) -> DayRows:
        index = self._index
        if stamp(self._path) != (index.size, index.mtime_ns):
            raise DataError(f"{self._path}: {_REPLACED}")
        with closing(TsvStream(self._path)) as stream:
            row = 0
            for segment in segments:
                unit = segment.first_row // UNIT_ROWS
                if not unit * UNIT_ROWS <= row <= segment.first_row:
                    stream.seek(index.offsets[unit])
                    row = unit * UNIT_ROWS
                stream.read(segment.first_row - row)
                rows = stream.read(segment.num_rows)
                row = segment.first_row + segment.num_rows
                yield rows, (Origin(str(self._path), segment.first_row, segment.num_rows),)

"""Reading Criteo's TSV files, plain or compressed, in bulk."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from recd_plugin_dlrm.criteo.days import (
    COLUMNS,
    DENSE,
    LABEL,
    UNIT_ROWS,
    Day,
    RawRows,
    Stretch,
    even_starts,
)
from recd_plugins.api import DataError, Origin, RecdError, read_note, write_note

BadLinePolicy = Literal["error", "skip"]

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_MB = 1 << 20
# Decompressed at once; what of it comes before the damage of a file is lost.
_CHUNK = _MB
_LONGEST_LINE = _MB
# Of bad lines, kept to be shown.
SHOWN = 5


@dataclass
class BadLines:
    """What becomes of lines that are none of Criteo's, and how many there were.

    Attributes:
        limit: so many are passed over, and the next is an error; with None the first is.
        parent: counts those of other files, too, and has the same limit.
        count: passed over so far.
        shown: of the first few, what is wrong.
    """

    limit: int | None
    parent: BadLines | None = None
    count: int = 0
    shown: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, policy: BadLinePolicy, most: int) -> BadLines:
        """``most`` where ``policy`` passes over bad lines, and else none."""
        return cls(most if policy == "skip" else None)

    def of_one_file(self) -> BadLines:
        """Counts those of a file by themselves; here they count as well."""
        return BadLines(self.limit, parent=self)

    def add(self, path: Path, line: int, text: bytes) -> None:
        """Count a line.

        Raises:
            DataError: it is one too many.
        """
        self.add_known(1, [f"{path}:{line}: {explain(text)}"])

    def add_known(self, count: int, shown: Sequence[str]) -> None:
        """Count lines, of which ``shown`` says what is wrong with the first few.

        Raises:
            DataError: they are too many.
        """
        if self.parent is not None:
            self.parent.add_known(count, shown)
        self.count += count
        self.shown += shown[: SHOWN - len(self.shown)]
        if count and self.limit is None:
            raise DataError(
                f"{shown[0]}; bad_lines: skip (--bad-lines skip of recd criteo convert) passes "
                "over some such lines"
            )
        if self.limit is not None and self.count > self.limit:
            raise DataError(
                f"more than {self.limit} bad lines, which is what max_bad_lines allows "
                "(--max-bad-lines of recd criteo convert); the first:\n  " + "\n  ".join(self.shown)
            )


def explain(text: bytes) -> str:
    """What is wrong with a line."""
    line = text.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    values = line.split("\t")
    if len(values) != len(COLUMNS):
        is_test = len(values) == len(COLUMNS) - 1 and _wrong_value(["0", *values]) is None
        hint = "; Kaggle's test.txt has no labels and cannot be read" if is_test else ""
        return (
            f"{len(values)} columns where there are {len(COLUMNS)}, separated by tabs{hint}: "
            f"{_short(line)}"
        )
    return _wrong_value(values) or f"no line of Criteo's: {_short(line)}"


def _wrong_value(values: Sequence[str]) -> str | None:
    """The first value that is none of its column's, of a line with all columns."""
    for number, (name, value) in enumerate(zip(COLUMNS, values, strict=True), 1):
        if name == LABEL:
            good, kind = r"[01]", "neither 0 nor 1"
        elif name in DENSE:
            good, kind = r"(-?[0-9]{1,18})?", "no whole number of at most 18 digits"
        else:
            good, kind = r"[0-9a-fA-F]{0,15}", "no hexadecimal number of at most 15 digits"
        if not re.fullmatch(good, value):
            return f"column {number} ({name}) is {_short(value)}, {kind}"
    return None


def compression_of(path: Path) -> str | None:
    """``gzip``, ``zstd`` or None, by the suffix."""
    return _COMPRESSIONS.get(path.suffix)


class TsvStream:
    """Rows of one file from some position on. Use as a context manager.

    Args:
        path: the file.
        bad_lines: counts the lines that are none of Criteo's.
        on_bytes: is given the file's bytes (decompressed) as they are read.

    Attributes:
        offset: of the next line in the file's bytes (decompressed).
        line: its 1-based number, where reading began at the start.

    Raises:
        DataError: there is no such file.
    """

    def __init__(
        self,
        path: Path,
        bad_lines: BadLines,
        on_bytes: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        self._path = path
        self._bad_lines = bad_lines
        self._on_bytes = on_bytes
        self._compression = compression_of(path)
        self.offset = 0
        self.line = 1
        self._source = self._open()
        # Bytes that were read; in them the line to parse next, and the end of the last whole line.
        self._data = b""
        self._at = self._stop = 0
        self._begin()

    def read(self, most: int) -> RawRows:
        """The next rows: ``most``, or fewer at the end of the file, where there are none at last.

        Raises:
            DataError: a bad line too many, or the file is damaged.
        """
        labels = np.empty(most, np.int8)
        dense, sparse = np.empty((13, most), np.int64), np.empty((26, most), np.int64)
        row = 0
        while row < most:
            if self._at == self._stop and not self._fill():
                break
            row = self._parse(labels, dense, sparse, row)
        return RawRows(labels[:row], list(dense[:, :row]), list(sparse[:, :row]))

    def seek(self, offset: int, line: int = 1) -> None:
        """Go to a line that starts at ``offset``; of a compressed file all before it is read."""
        if offset < self.offset and self._compression:
            self._source.close()
            self._source = self._open()
            self._begin()
            self.offset = 0
        if not self._compression:
            self._source.seek(offset)
            self._begin()
        else:
            while self.offset + len(self._data) - self._at < offset:
                self.offset += len(self._data) - self._at
                self._begin()
                if not self._fill():
                    raise DataError(f"{self._path} was replaced while it was in use; start anew")
            self._at += offset - self.offset
            self._stop = max(self._stop, self._at)
        self.offset, self.line = offset, line

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> None:
        self._data = b""
        self._array = np.frombuffer(self._data, np.uint8)
        self._at = self._stop = 0

    def _open(self) -> Any:
        try:
            if self._compression is None:
                return self._path.open("rb", buffering=0)
            return pa.input_stream(
                str(self._path), compression=self._compression, buffer_size=_CHUNK
            )
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error})") from error

    def _fill(self) -> bool:
        """Read on, until there is a whole line; False at the end of the file."""
        while True:
            chunk = self._next_bytes()
            self._on_bytes(chunk)
            rest = self._data[self._at :]
            if not chunk and rest:
                # The last line may end without a line feed.
                chunk = b"\n"
            elif not chunk:
                return False
            self._data = rest + chunk
            self._array = np.frombuffer(self._data, np.uint8)
            self._at, self._stop = 0, self._data.rfind(b"\n") + 1
            if self._stop:
                return True
            if len(self._data) > _LONGEST_LINE:
                raise DataError(
                    f"{self._path}:{self.line}: no end of this line within {_LONGEST_LINE} bytes; "
                    "this is no TSV file of Criteo's"
                )

    def _next_bytes(self) -> bytes:
        try:
            chunk: bytes = self._source.read(_CHUNK)
        except OSError as error:
            if self._compression is None:
                raise DataError(f"{self._path}: cannot be read ({error})") from error
            end = self.offset + len(self._data) - self._at
            readable = (
                f". The lines before {self.line} ({end} bytes of text) can be read, and maybe some "
                "more"
                if end
                else ""
            )
            raise DataError(
                f"{self._path}: the file is cut off or damaged, or is not what its name says "
                f"({error}){readable}; fetch it again"
            ) from error
        return chunk

    def _parse(self, labels: np.ndarray, dense: np.ndarray, sparse: np.ndarray, row: int) -> int:
        """Fill rows from ``row`` on, and say which row is next."""
        # Numba takes a while to import, and the module is imported by `recd plugins`.
        from recd_plugin_dlrm.criteo.tsv_kernels import parse_lines

        end, at, is_bad = parse_lines(self._array, self._at, self._stop, labels, dense, sparse, row)
        self.line += end - row
        if is_bad:
            after = self._data.index(b"\n", at) + 1
            self._bad_lines.add(self._path, self.line, self._data[at:after])
            self.line += 1
            at = after
        self.offset += at - self._at
        self._at = at
        return int(end)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


_VERSION = 1


@dataclass(frozen=True)
class TsvIndex:
    """The index of one file.

    Attributes:
        size, mtime_ns: of the file when it was read.
        num_rows: lines but for bad ones.
        checksum: CRC-32 of the text, decompressed.
        offsets: where the lines of rows 0, ``UNIT_ROWS``, 2 * ``UNIT_ROWS``... start in the text.
        num_bad_lines: how many were passed over.
        bad_lines: what is wrong with the first of them.
    """

    size: int
    mtime_ns: int
    num_rows: int
    checksum: int
    offsets: list[int]
    num_bad_lines: int
    bad_lines: list[str]


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of change.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return found.st_size, found.st_mtime_ns


def load_index(path: Path, cache: Path) -> TsvIndex | None:
    """The index that was kept of ``path`` as it is now, if there is one."""
    found = read_note(_place(path, cache))
    if found is None or (found.pop("version"), found.pop("unit_rows")) != (_VERSION, UNIT_ROWS):
        return None
    index = TsvIndex(**found)
    return index if (index.size, index.mtime_ns) == stamp(path) else None


def make_index(
    path: Path, cache: Path, bad_lines: BadLines, progress: Callable[[int], None]
) -> TsvIndex:
    """Read ``path``, which finds all that is wrong with it, and keep its index in ``cache``.

    Args:
        path: the file.
        cache: the folder.
        bad_lines: counts those of this file besides others.
        progress: takes rows done since the last call.

    Raises:
        DataError: a bad line too many, the file is damaged or empty, or changes meanwhile.
    """
    size, mtime_ns = stamp(path)
    checksum = 0

    def add(chunk: bytes) -> None:
        nonlocal checksum
        checksum = zlib.crc32(chunk, checksum)

    mine = bad_lines.of_one_file()
    offsets, num_rows = [], 0
    with TsvStream(path, mine, add) as stream:
        while True:
            offset = stream.offset
            rows = len(stream.read(UNIT_ROWS))
            if rows == 0:
                break
            offsets.append(offset)
            num_rows += rows
            progress(rows)
    if num_rows == 0:
        raise DataError(f"{path}: no rows in this file")
    if (size, mtime_ns) != stamp(path):
        raise DataError(f"{path} changes while it is read; wait until it is complete")
    index = TsvIndex(size, mtime_ns, num_rows, checksum, offsets, mine.count, mine.shown)
    try:
        write_note(
            _place(path, cache), {"version": _VERSION, "unit_rows": UNIT_ROWS, **asdict(index)}
        )
    except RecdError as error:
        raise DataError(f"{error}; option cache names another folder") from error
    return index


def _place(path: Path, cache: Path) -> Path:
    return cache / f"{path.name}.index.json"


class TsvDay(Day):
    """Rows of a file whose index is known.

    Of a plain file reading begins at any unit. A compressed one is read through to where reading
    begins, decompressed but not parsed: forward that is done once.
    """

    def __init__(self, name: str, path: Path, index: TsvIndex) -> None:
        self.name = name
        self.can_jump = compression_of(path) is None
        self.num_rows = index.num_rows
        self.starts = even_starts(index.num_rows)
        self._path = path
        self._index = index

    def identity(self) -> list[Any]:
        return [self.name, self.num_rows, self._index.checksum]

    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        index = self._index
        if stamp(self._path) != (index.size, index.mtime_ns):
            raise self._replaced()
        # Those that the index passed over are passed over again.
        bad_lines = BadLines(limit=index.num_bad_lines)
        with TsvStream(self._path, bad_lines) as stream:
            row = 0
            for stretch in stretches:
                unit = stretch.first_row // UNIT_ROWS
                if not unit * UNIT_ROWS <= row <= stretch.first_row:
                    stream.seek(index.offsets[unit])
                    bad_lines.count, row = 0, unit * UNIT_ROWS
                if row < stretch.first_row:
                    self._rows(stream, stretch.first_row - row)
                rows = self._rows(stream, stretch.num_rows)
                row = stretch.first_row + stretch.num_rows
                origin = Origin(str(self._path), stretch.first_row, stretch.num_rows)
                yield rows, (origin,)

    def _rows(self, stream: TsvStream, num_rows: int) -> RawRows:
        rows = stream.read(num_rows)
        if len(rows) != num_rows:
            raise self._replaced()
        return rows

    def _replaced(self) -> DataError:
        return DataError(f"{self._path} was replaced while it was in use; start anew")

"""Reading Criteo's TSV files, plain or compressed, in bulk."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from recd_plugin_dlrm.criteo.rows import COLUMNS, DENSE, LABEL, RawRows
from recd_plugins.api import DataError

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

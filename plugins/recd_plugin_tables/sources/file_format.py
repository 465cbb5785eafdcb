"""What a format of files has: how to see the columns of one and how to read its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pyarrow as pa

from recd_plugins.api import DataError, Location

_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# First bytes of a file that are looked at.
_START = 4096
# Those of formats.
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"FEA1": "Feather version 1",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "a zip file or a spreadsheet",
    b"SQLite format 3": "SQLite",
    b"ORC": "ORC",
    b"Obj\x01": "Avro",
}


class FileFormat(ABC):
    """How files of one format are read.

    Attributes:
        name: as option ``format`` has it.
        suffixes: what names of such files end with, first the usual one.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def schema(self, file: Location) -> pa.Schema:
        """The columns of a file. Errors are Arrow's."""

    @abstractmethod
    def read(
        self, file: Location, schema: pa.Schema, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a file in order, with ``columns`` of it; errors are Arrow's.

        Args:
            file: where it is.
            schema: of the whole table, whose types this file may have to be read by.
            columns: in which order they come is not said.
        """

    def num_rows(self, file: Location) -> int | None:  # noqa: ARG002
        """How many rows a file has, None where reading shows it."""
        return None


@contextmanager
def format_errors(file: Location, name: str) -> Iterator[None]:
    """A context in which errors of Arrow become those that name the file, and what it is.

    Raises:
        DataError: the file cannot be read, is damaged, or is of another format.
        SetupError: its store cannot be reached.
    """
    try:
        with file.told():
            yield
    except (pa.ArrowException, OSError, UnicodeError, EOFError) as error:
        found = looks_like(file)
        if found is not None and found not in (name, _compression_of(file)):
            known = found in ("parquet", "arrow", "csv", "tsv", "jsonl")
            advice = (
                f"{set_option('format', found)}, or rename it"
                if known
                else "write it in a format of README.md: Parquet, CSV, JSON lines or Arrow"
            )
            raise DataError(f"{file}: this is {found}, not {name}; {advice}") from error
        how = ""
        if "conversion error" in str(error):
            how = "; the first rows were of this type, so name another by types: {column: string}"
        raise DataError(f"{file}: no readable {name} file: {error}{how}") from error


def open_stream(file: Location) -> pa.NativeFile:
    """The bytes of a file of text from its start, decompressed where its name says so."""
    source = file.open()
    kind = _compression_of(file)
    return pa.CompressedInputStream(source, kind) if kind else source


def _compression_of(file: Location) -> str | None:
    """What the name of a file says."""
    name = str(file.path).lower()  # as formats are told by it
    return next((kind for suffix, kind in _COMPRESSED.items() if name.endswith(suffix)), None)


def with_compressed(suffixes: Sequence[str]) -> tuple[str, ...]:
    """The suffixes, and those of the same files compressed."""
    return (*suffixes, *(suffix + packed for suffix in suffixes for packed in _COMPRESSED))


def looks_like(file: Location) -> str | None:
    """Return the format that the first bytes of a file show, decompressed if its name says so."""
    try:
        with open_stream(file) as source:
            start = source.read(_START)
    except (pa.ArrowException, OSError):
        return None
    if start[8:12] == b"DUCK":
        return "duckdb"
    found = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    return found or _text_format(start)


def _text_format(start: bytes) -> str | None:
    """What lines of text could be; None where there is none."""
    line = start.partition(b"\n")[0].strip()
    if not line or not line.decode("utf-8", "ignore").replace("\t", " ").isprintable():
        return None
    if line.startswith(b"{"):
        return "jsonl"
    return "tsv" if b"\t" in line else "csv" if b"," in line or b";" in line else None


def set_option(name: str, value: str) -> str:
    """How a reader is told of an option, in a registry file and to `recd init`."""
    return f"set {name}: {value} (recd init: --{name} {value})"

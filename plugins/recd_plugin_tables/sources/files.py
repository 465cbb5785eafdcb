"""What a format of files has: how to see the columns of one and how to read its rows."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from recd_plugin_tables.sources.source import BATCH_ROWS, Source, check_names
from recd_plugins.api import DataError, Location, Origin, Rows

_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# First bytes of a file that are looked at.
_START = 4096
# Those of formats.
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "a zip file or a spreadsheet",
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
    """A context in which errors of Arrow become those that name the file, and what it is."""
    try:
        with file.told():
            yield
    except (pa.ArrowException, OSError, UnicodeError, EOFError) as error:
        found = looks_like(file)
        if found is not None and found not in (name, _compression_of(file)):
            raise DataError(
                f"{file}: this is {found}, not {name}; {set_option('format', found)}, or write it "
                "as Parquet, CSV, JSON lines or Arrow"
            ) from error
        how = ""
        if "Expected 1 columns" in str(error):
            how = f"; {set_option('separator', repr(';'))} if that is what separates columns"
        if "conversion error" in str(error):
            how = "; the first rows were of this type, so name another by types: {column: string}"
        raise DataError(f"{file}: no readable {name} file: {error}{how}") from error


def open_stream(file: Location) -> pa.NativeFile:
    """The bytes of a file of text from its start, decompressed where its name says so."""
    source = file.open()
    kind = _compression_of(file)
    return pa.CompressedInputStream(source, kind) if kind else source


def _compression_of(file: Location) -> str | None:
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


_FILE_MAGIC = b"ARROW1"
#: End-of-stream mark of Arrow IPC. Before Arrow 0.15 it was only the last four bytes.
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class ParquetFormat(FileFormat):
    """Parquet files."""

    name = "parquet"
    suffixes = (".parquet", ".pq", ".parq")

    def schema(self, file: Location) -> pa.Schema:
        with file.open() as source, _open_parquet(source) as table:
            fields = map(table.schema.column, range(len(table.schema)))
            if any(field.physical_type == "INT96" for field in fields):
                return table.schema_arrow
            return table.schema.to_arrow_schema()

    def num_rows(self, file: Location) -> int | None:
        with file.open() as source:
            return int(pq.read_metadata(source).num_rows)

    def read(
        self,
        file: Location,
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        with file.open() as source, _open_parquet(source) as table:
            # Top columns by their numbers: a name with a dot would be taken for a struct's field.
            yield from table.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=True)


class ArrowFormat(FileFormat):
    """Arrow IPC files and streams, and Feather files, which are the former."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def schema(self, file: Location) -> pa.Schema:
        with file.open() as source:
            return _open(source).schema

    def num_rows(self, file: Location) -> int | None:
        with file.open() as source:
            reader = _open(source)
            if not isinstance(reader, ipc.RecordBatchFileReader):
                return None
            return sum(
                reader.get_batch(number).num_rows for number in range(reader.num_record_batches)
            )

    def read(
        self,
        file: Location,
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        with file.open() as source:
            reader = _open(source)
            batches: Iterator[pa.RecordBatch]
            if isinstance(reader, ipc.RecordBatchFileReader):
                batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
            else:
                batches = _whole_stream(file, source, reader)
            for batch in batches:
                chosen = batch.select(list(columns))
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield chosen.slice(start, BATCH_ROWS)


def _whole_stream(
    file: Location, source: pa.NativeFile, reader: ipc.RecordBatchStreamReader
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream. A missing end mark is an error here, but not for Arrow."""
    end, num_rows = source.tell(), 0
    for batch in reader:
        end, num_rows = source.tell(), num_rows + batch.num_rows
        yield batch
    source.seek(end)
    rest = source.read(len(STREAM_END) + 1)
    if rest not in (STREAM_END, STREAM_END[4:]):
        longer = rest.startswith((STREAM_END, STREAM_END[4:]))
        what = (
            "has data after its end mark," if longer else "has no end mark, so it may be truncated,"
        )
        raise DataError(
            f"{file}: the Arrow stream {what} after {num_rows:,} rows; write the file again"
        )


def _open_parquet(source: pa.NativeFile) -> pq.ParquetFile:
    # Nanoseconds, which Arrow makes of Spark's times, wrap around beyond the year 2262.
    return pq.ParquetFile(source, page_checksum_verification=True, coerce_int96_timestamp_unit="us")


def _open(source: pa.NativeFile) -> ipc.RecordBatchFileReader | ipc.RecordBatchStreamReader:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


# The folder of a Hive partition whose key is null.
_NULL_KEY = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile("-?[0-9]+")
_BLOCK = 1 << 22


class FileSource(Source):
    """Files of one format, in the order of their names; keys of Hive partitions are columns.

    Keys that the files hold themselves are as they hold them. Folders that lead to the location
    count, so that one partition has the columns of the whole table.

    Args:
        root: the location.
        files: of it, all that are read.
        form: of the files.
        texts: keys that are text even where all are numbers.
    """

    def __init__(
        self,
        root: Location,
        files: Sequence[Location],
        form: FileFormat,
        texts: Collection[str] = (),
    ) -> None:
        self.location = str(root)
        self._root, self._files, self._format = root, tuple(files), form
        above = _folders_above(root, is_file=files[0].path == root.path)
        keys = [_keys([*above, *file.below(root).split("/")[:-1]]) for file in files]
        self._keys = {
            name: _key_column([key.get(name) for key in keys], as_text=name in texts)
            for name in keys[0]
        }
        for file, key in zip(files, keys, strict=True):
            if key.keys() != keys[0].keys():
                raise DataError(
                    f"files of one table differ: {files[0]} is in folders of the keys "
                    f"{', '.join(keys[0]) or 'none'}, {file} of {', '.join(key) or 'none'}"
                )

    @cached_property
    def schema(self) -> pa.Schema:
        fields = [pa.field(name, self._keys[name].type) for name in self.folder_keys]
        return check_names(self.location, pa.schema([*self._inner, *fields]))

    @property
    def folder_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self._keys if name not in self._inner.names)

    @cached_property
    def num_rows(self) -> int | None:
        total = 0
        for file in self._files:
            with format_errors(file, self._format.name):
                count = self._format.num_rows(file)
            if count is None:
                return None
            total += count
        return total

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        inner = frozenset(self._inner.names)  # a schema makes its names anew each time
        stored = [name for name in names if name in inner]
        for number, file in enumerate(self._files):
            first_row = 0
            with format_errors(file, self._format.name):
                # A column at least, for the number of rows.
                for batch in self._format.read(file, self._inner, stored or self._inner.names[:1]):
                    arrays = [
                        _cast(batch.column(field.name), field, file, first_row)
                        if field.name in inner
                        else self._keys[field.name].take(pa.array([number] * batch.num_rows))
                        for field in schema
                    ]
                    origin = Origin(str(file), first_row, batch.num_rows)
                    first_row += batch.num_rows
                    yield Rows(pa.RecordBatch.from_arrays(arrays, schema=schema), (origin,))

    def identity(self) -> dict[str, Any]:
        return {"format": self._format.name, "files": self._versions}

    @cached_property
    def _versions(self) -> list[list[str | int | None]]:
        """Name, size and time of change of each; a digest where its store tells no times."""
        return [
            [
                file.below(self._root),
                file.size,
                _digest(file) if file.changed is None else file.changed,
            ]
            for file in self._files
        ]

    @cached_property
    def _inner(self) -> pa.Schema:
        """The columns of all files, of the wider type where numbers differ in it."""
        first = known = self._schema(self._files[0])
        for file in self._files[1:]:
            schema = self._schema(file)
            if alone := sorted({*first.names} ^ {*schema.names}):
                raise DataError(
                    f"files of one table differ: only one of {self._files[0]} and {file} has "
                    f"column {alone[0]}"
                )
            try:
                known = pa.unify_schemas([known, schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(
                    f"files of one table differ in their types: {file} ({error}); write them with "
                    "the same types, or name types of text by option types"
                ) from error
        return known

    def _schema(self, file: Location) -> pa.Schema:
        with format_errors(file, self._format.name):
            return check_names(str(file), self._format.schema(file)).remove_metadata()


def _digest(file: Location) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.told(), file.open() as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _folders_above(root: Location, *, is_file: bool) -> list[str]:
    path = root.local.absolute().as_posix() if root.local is not None else str(root.path)
    folders = path.rstrip("/").split("/")
    above = takewhile(lambda folder: "=" in folder, reversed(folders[:-1] if is_file else folders))
    return [*reversed([*above])]


def _keys(folders: Sequence[str]) -> dict[str, str]:
    return dict(folder.split("=", 1) for folder in folders if "=" in folder)


def _key_column(words: Sequence[str | None], *, as_text: bool) -> pa.Array:
    """The keys of folders: integers if all are and stay distinct, else text."""
    values = [None if word in (None, _NULL_KEY) else unquote(str(word)) for word in words]
    distinct = {value for value in values if value is not None}
    if not as_text and all(_WHOLE.fullmatch(value) for value in distinct):
        numbers = {value: int(value) for value in distinct}
        fits = all(-(2**63) <= number < 2**63 for number in numbers.values())
        if fits and len(set(numbers.values())) == len(distinct):  # 0123 and 123 are two codes
            found = [None if value is None else numbers[value] for value in values]
            return pa.array(found, pa.int64())
    return pa.array(values, pa.string())


def _cast(column: pa.Array, field: pa.Field, file: Location, first_row: int) -> pa.Array:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"{file}: column {field.name}, rows from {first_row} (from 0): {error}"
        ) from error

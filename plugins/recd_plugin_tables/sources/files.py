"""Sources of one or several files in one format; readers of Parquet and Arrow files."""

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
from recd_plugins.api import DataError, Origin, Rows, object_stores

_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Folder name of a Hive partition whose key is null.
_NULL_KEY = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile("-?[0-9]+")
_BLOCK = 1 << 22
#: End mark of an Arrow stream. Before Arrow 0.15 it was only the last four bytes.
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class FileFormat(ABC):
    """Base class of file format readers. ``suffixes`` lists file suffixes, the usual one first."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    names_in_first_line = False
    empty_is_null = False

    @abstractmethod
    def schema(self, file: object_stores.Location) -> pa.Schema:
        """Return the schema of a file."""

    @abstractmethod
    def read(
        self, file: object_stores.Location, schema: pa.Schema, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file with at least ``columns``. ``schema`` is the table's schema."""

    def num_rows(self, file: object_stores.Location) -> int | None:  # noqa: ARG002
        """Return the number of rows of a file, or None if counting would read the complete file."""
        return None


@contextmanager
def _format_errors(file: object_stores.Location, name: str) -> Iterator[None]:
    """Convert Arrow errors to ``DataError`` with the name of the file."""
    try:
        with file.told():
            yield
    except (pa.ArrowException, OSError, UnicodeError, EOFError) as error:
        how = ""
        if "Expected 1 columns" in str(error):
            how = f". If the separator is ; then {set_option('separator', repr(';'))}."
        elif sizes := re.search(r"(Row #\d+): Expected (\d+) columns, got (\d+)", str(error)):
            row, expected, found = sizes.groups()
            raise DataError(
                f"{file}: {row} has {found} columns instead of {expected}. Write all columns in "
                "every row, and leave unknown values empty, such as the labels of rows to score."
            ) from error
        if "conversion error" in str(error):
            how = (
                ". The type was inferred from the first rows. Set source.types, such as {COLUMN: "
                "string}."
            )
        raise DataError(f"{file}: the {name} file cannot be read: {error}{how}") from error


def open_stream(file: object_stores.Location) -> pa.NativeFile:
    """Open a text file and decompress it according to its suffix."""
    source = file.open()
    kind = _compression_of(file)
    return pa.CompressedInputStream(source, kind) if kind else source


def _compression_of(file: object_stores.Location) -> str | None:
    name = str(file.path).lower()
    return next((kind for suffix, kind in _COMPRESSED.items() if name.endswith(suffix)), None)


def with_compressed(suffixes: Sequence[str]) -> tuple[str, ...]:
    """Return the suffixes, and each suffix combined with each compression suffix."""
    return (*suffixes, *(suffix + packed for suffix in suffixes for packed in _COMPRESSED))


def set_option(name: str, value: str) -> str:
    """Describe, for a message, how to set an option in a registry file and in `recd init`."""
    return f"set source.{name}: {value} (recd init: --{name} {value})"


def no_header(location: object, names: Sequence[str]) -> DataError:
    """Return an error for a text file whose first line contains data instead of column names."""
    made = ",".join(f"f{number}" for number in range(1, len(names) + 1))
    shown = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
    return DataError(
        f"{location}: the first line contains {shown} instead of column names. List the "
        f"{len(names)} column names in source.header (recd init: --header {made})."
    )


class ParquetFormat(FileFormat):
    """Parquet files."""

    name = "parquet"
    suffixes = (".parquet", ".pq", ".parq")

    def schema(self, file: object_stores.Location) -> pa.Schema:
        with file.open() as source, _open_parquet(source) as table:
            return table.schema_arrow

    def num_rows(self, file: object_stores.Location) -> int | None:
        with file.open() as source:
            return int(pq.read_metadata(source).num_rows)

    def read(
        self,
        file: object_stores.Location,
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        with file.open() as source, _open_parquet(source) as table:
            yield from table.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=True)


def _open_parquet(source: pa.NativeFile) -> pq.ParquetFile:
    # Nanoseconds, which Arrow makes of Spark's times, wrap around beyond the year 2262.
    return pq.ParquetFile(source, page_checksum_verification=True, coerce_int96_timestamp_unit="us")


class ArrowFormat(FileFormat):
    """Arrow IPC files (Feather) and Arrow IPC streams."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def schema(self, file: object_stores.Location) -> pa.Schema:
        with file.open() as source:
            return _open_arrow(source).schema

    def num_rows(self, file: object_stores.Location) -> int | None:
        with file.open() as source:
            reader = _open_arrow(source)
            if not isinstance(reader, ipc.RecordBatchFileReader):
                return None
            return sum(reader.get_batch(n).num_rows for n in range(reader.num_record_batches))

    def read(
        self,
        file: object_stores.Location,
        schema: pa.Schema,  # noqa: ARG002
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        with file.open() as source:
            reader = _open_arrow(source)
            batches: Iterator[pa.RecordBatch]
            if isinstance(reader, ipc.RecordBatchFileReader):
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = _whole_stream(file, source, reader)
            for batch in batches:
                chosen = batch.select(list(columns))
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield chosen.slice(start, BATCH_ROWS)


def _whole_stream(
    file: object_stores.Location, source: pa.NativeFile, reader: ipc.RecordBatchStreamReader
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow stream, and raise an error if its end marker is missing."""
    end, num_rows = source.tell(), 0
    for batch in reader:
        end, num_rows = source.tell(), num_rows + batch.num_rows
        yield batch
    source.seek(end)
    if source.read(len(STREAM_END) + 1) not in (STREAM_END, STREAM_END[4:]):
        raise DataError(
            f"{file}: the Arrow stream has no end-of-stream marker after {num_rows:,} rows, so it "
            "may be truncated. Write the file again."
        )


def _open_arrow(source: pa.NativeFile) -> Any:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


class FileSource(Source):
    """Table of one or several files in name order. Hive partition keys become columns.

    If the files have a column with the name of a key, that column is used. Parent folders of the
    location count as partitions, so a single partition has the same columns as the complete table.

    Args:
        root: the location.
        files: its files.
        form: format of the files.
        texts: key columns that are text even if all values are numbers.
    """

    def __init__(
        self,
        root: object_stores.Location,
        files: Sequence[object_stores.Location],
        form: FileFormat,
        texts: Collection[str] = (),
    ) -> None:
        self.location = str(root)
        self._root, self._files, self._format = root, tuple(files), form
        self.names_in_first_line = form.names_in_first_line
        self.empty_is_null = form.empty_is_null
        above = _folders_above(root, is_file=files[0].path == root.path)
        keys = [_keys([*above, *file.below(root).split("/")[:-1]]) for file in files]
        self._keys = {
            name: _key_column([key.get(name) for key in keys], as_text=name in texts)
            for name in dict.fromkeys(name for key in keys for name in key)
        }

    @cached_property
    def schema(self) -> pa.Schema:
        inner = self._inner
        keys = [pa.field(n, key.type) for n, key in self._keys.items() if n not in inner.names]
        return check_names(self.location, pa.schema([*inner, *keys]))

    @cached_property
    def num_rows(self) -> int | None:
        total = 0
        for file in self._files:
            with _format_errors(file, self._format.name):
                count = self._format.num_rows(file)
            if count is None:
                return None
            total += count
        return total

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        inner = frozenset(self._inner.names)  # ``names`` creates a new list at each access
        # Read at least one column to learn the number of rows.
        stored = [name for name in names if name in inner] or self._inner.names[:1]
        for number, file in enumerate(self._files):
            first_row = 0
            with _format_errors(file, self._format.name):
                for batch in self._format.read(file, self._inner, stored):
                    arrays = [
                        _cast(batch.column(field.name), field.type)
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
        """Return the name, size and modification time (or a digest) of each file."""
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
        """The merged schema of all files. If number types differ, the wider type is used."""
        first = known = self._schema(self._files[0])
        for file in self._files[1:]:
            schema = self._schema(file)
            if alone := sorted({*first.names} ^ {*schema.names}):
                raise DataError(
                    f"{file}: the columns differ from {self._files[0]}: only one of the files has "
                    f"column {alone[0]!r}. Write all files with the same columns."
                )
            try:
                known = pa.unify_schemas([known, schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(
                    f"{file}: the column types differ from other files of the table ({error}). "
                    "Write all files with the same types; for text files set source.types."
                ) from error
        return known

    def _schema(self, file: object_stores.Location) -> pa.Schema:
        with _format_errors(file, self._format.name):
            return check_names(str(file), self._format.schema(file)).remove_metadata()


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)


def _digest(file: object_stores.Location) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.told(), file.open() as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _folders_above(root: object_stores.Location, *, is_file: bool) -> list[str]:
    path = root.local.absolute().as_posix() if root.local is not None else str(root.path)
    folders = path.rstrip("/").split("/")
    above = takewhile(lambda folder: "=" in folder, reversed(folders[:-1] if is_file else folders))
    return [*reversed([*above])]


def _keys(folders: Sequence[str]) -> dict[str, str]:
    return dict(folder.split("=", 1) for folder in folders if "=" in folder)


def _key_column(words: Sequence[str | None], *, as_text: bool) -> pa.Array:
    """Return a Hive partition key as integers if no information is lost, otherwise as text."""
    values = [None if word in (None, _NULL_KEY) else unquote(str(word)) for word in words]
    distinct = {value for value in values if value is not None}
    if not as_text and all(_WHOLE.fullmatch(value) for value in distinct):
        numbers = {value: int(value) for value in distinct}
        fits = all(-(2**63) <= number < 2**63 for number in numbers.values())
        if fits and len(set(numbers.values())) == len(distinct):  # 0123 and 123 are two codes
            found = [None if value is None else numbers[value] for value in values]
            return pa.array(found, pa.int64())
    return pa.array(values, pa.string())

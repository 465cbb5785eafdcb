"""Readers of CSV, TSV and JSON lines. Column types are inferred from the first rows."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.json as pa_json

from recd_plugin_tables.sources.files import (
    FileFormat,
    no_header,
    open_stream,
    set_option,
    with_compressed,
)
from recd_plugins.api import DataError, object_stores

# Bytes per block. Types are inferred from the first block.
_BLOCK = 8 << 20
# Texts that would lose a leading zero as integers.
_CODE = r"^-?0\d"
# Digits that a float would round. Columns with fractions are amounts, which may be rounded.
_LARGE = r"^-?\d{19,}$"
_FRACTION = r"[.,]|\d[eE]"
# Arrow infers types recursively and crashes at 100,000 levels of nested lists.
_MAX_LEVELS = 64
_JSON_STRING = rb'"(?:[^"\\]|\\.)*"'


class CsvFormat(FileFormat):
    """Reader of text files whose columns are separated by one character.

    An empty field is null. A column of integers is read as text if a value has a leading zero
    (01234 is not 1234) or needs more than 64 bits.

    Args:
        separator: character between columns; None means the default of the format.
        header: column names, or None to read them from the first line.
        types: type name per column, instead of an inferred type.
        decimal: decimal separator.
        needed: columns of ``types`` that must exist.
    """

    name = "csv"
    suffixes = with_compressed([".csv"])
    empty_is_null = True
    separator = ","

    def __init__(
        self,
        separator: str | None,
        header: Sequence[str] | None,
        types: Mapping[str, str],
        *,
        decimal: str = ".",
        needed: Collection[str],
    ) -> None:
        self._separator = separator or self.separator
        self._decimal = decimal
        self._needed = needed
        self._header = list(header) if header is not None else None
        self.names_in_first_line = header is None
        self._types = {name: pa.type_for_alias(kind) for name, kind in types.items()}

    def schema(self, file: object_stores.Location) -> pa.Schema:
        with open_stream(file) as source, self._open(source, self._types) as reader:
            found = reader.schema
        if unknown := sorted(set(self._needed) - set(found.names)):
            raise DataError(
                f"{file}: source.types contains {unknown[0]!r}, but the file has no such column. "
                f"Use one of its columns: {', '.join(map(repr, found.names))}."
            )
        self._check_names(file, found.names)
        # Arrow would read non-UTF-8 text as bytes, whose ids differ from the ids of the text.
        for field in found:
            if pa.types.is_binary(field.type) and field.name not in self._types:
                raise DataError(
                    f"{file}: column {field.name!r} contains text that is not UTF-8. Convert the "
                    "file, for example with iconv -f latin1 -t utf-8, or set source.types: "
                    f"{{{field.name}: binary}} for binary data."
                )
        codes = set(self._codes(file, found))
        return pa.schema([f.with_type(pa.string()) if f.name in codes else f for f in found])

    def _codes(self, file: object_stores.Location, found: pa.Schema) -> Iterator[str]:
        """Yield names of number columns whose values lose information as numbers, such as 01234."""
        kinds = {
            field.name: field.type
            for field in found
            if field.name not in self._types
            and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type))
        }
        if not kinds:
            return
        texts = dict.fromkeys(kinds, pa.string())
        with open_stream(file) as source, self._open(source, texts, list(texts)) as reader:
            for batch in islice(reader, 1):
                for (name, kind), column in zip(kinds.items(), batch.columns, strict=True):
                    if (
                        _any(column, _CODE)
                        if pa.types.is_integer(kind)
                        else _any(column, _LARGE) and not _any(column, _FRACTION)
                    ):
                        yield name

    def read(
        self, file: object_stores.Location, schema: pa.Schema, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        types = {name: schema.field(name).type for name in columns}
        # Append an empty row: an unclosed quote would swallow it and all rows before it.
        empty = self._separator * (len(schema) - 1) or '""'
        with (
            open_stream(file) as source,
            pa.PythonFile(_Extended(source, f"\n{empty}\n".encode()), mode="r") as extended,
            self._open(extended, types, columns) as reader,
        ):
            num_rows, last = 0, _with_nulls(reader.read_next_batch())
            for batch in reader:
                num_rows += last.num_rows
                yield last
                last = _with_nulls(batch)
            num_rows += last.num_rows - 1
            if any(column[-1].as_py() not in (None, b"") for column in last.columns):
                raise DataError(
                    f"{file}: row {num_rows} (from 0) has an unclosed quote. Close the quote, or "
                    "write the file again if it was truncated."
                )
            if last.num_rows > 1:
                yield last.slice(0, last.num_rows - 1)

    def _open(
        self,
        source: pa.NativeFile,
        types: Mapping[str, pa.DataType],
        columns: Sequence[str] | None = None,
    ) -> pc_csv.CSVStreamingReader:
        return pc_csv.open_csv(
            source,
            # Use one thread, so that errors name the row.
            pc_csv.ReadOptions(block_size=_BLOCK, column_names=self._header, use_threads=False),
            pc_csv.ParseOptions(delimiter=self._separator, newlines_in_values=True),
            pc_csv.ConvertOptions(
                column_types=dict(types),
                include_columns=list(columns) if columns else None,
                decimal_point=self._decimal,
            ),
        )

    def _check_names(self, file: object_stores.Location, names: Sequence[str]) -> None:
        if self.names_in_first_line and names:
            numbers = [not name or is_number(name) for name in names]
            if all(numbers) or (any(numbers) and len(set(names)) < len(names)):
                raise no_header(file, names)
        others = [each for each in ";\t|," if each != self._separator and each in names[0]]
        if len(names) == 1 and others:
            raise DataError(
                f"{file}: the only column is {names[0]!r}, so the separator may be wrong. To fix, "
                f"{set_option('separator', repr(others[0]))}."
            )


class TsvFormat(CsvFormat):
    """Reader of text files whose columns are separated by tabs."""

    name = "tsv"
    suffixes = with_compressed([".tsv", ".tab"])
    separator = "\t"


class JsonLinesFormat(FileFormat):
    """Reader of files with one JSON object per line. ``texts`` lists columns that are not times."""

    name = "jsonl"
    suffixes = with_compressed([".jsonl", ".ndjson", ".json"])

    def __init__(self, types: Mapping[str, str], texts: Collection[str] = ()) -> None:
        self._types = {name: pa.type_for_alias(kind) for name, kind in types.items()}
        self._texts = texts

    def schema(self, file: object_stores.Location) -> pa.Schema:
        with open_stream(file) as source:
            start = source.read(_BLOCK)
        if start.startswith(b"["):
            raise DataError(
                f"{file}: the file is one JSON array, not JSON lines. Write one JSON object per "
                "line, without brackets and commas around the objects."
            )
        for row, line in enumerate(start.splitlines()):
            if (levels := _num_levels(line)) > _MAX_LEVELS:
                raise DataError(
                    f"{file}: row {row} (from 0) is nested {levels:,} levels deep, but at most "
                    f"{_MAX_LEVELS} are supported. Flatten the row."
                )
        fields = [pa.field(name, kind) for name, kind in self._types.items()]
        with open_stream(file) as source:
            found = _open_json(source, pa.schema(fields), "infer").schema
        return pa.schema([_as_named(field, "", self._texts) for field in found])

    def read(
        self,
        file: object_stores.Location,
        schema: pa.Schema,
        columns: Sequence[str],  # noqa: ARG002
    ) -> Iterator[pa.RecordBatch]:
        with open_stream(file) as source:
            yield from _open_json(source, schema, "error")


class _Extended(io.RawIOBase):
    """The bytes of a stream, followed by the bytes ``more``."""

    def __init__(self, source: pa.NativeFile, more: bytes) -> None:
        self._source, self._more = source, more

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if found := self._source.read(None if size < 0 else size):
            return bytes(found)
        found, self._more = self._more, b""
        return found


def _num_levels(line: bytes) -> int:
    if line.count(b"[") + line.count(b"{") <= _MAX_LEVELS:
        return 0
    brackets = re.findall(rb"[][{}]", re.sub(_JSON_STRING, b"", line))
    return max(accumulate(1 if each in b"[{" else -1 for each in brackets), default=0)


def _open_json(source: pa.NativeFile, schema: pa.Schema, others: str) -> Any:
    return pa_json.open_json(
        source,
        pa_json.ReadOptions(use_threads=False, block_size=_BLOCK),
        pa_json.ParseOptions(
            explicit_schema=schema if len(schema) else None,
            newlines_in_values=False,
            unexpected_field_behavior=others,
        ),
    )


def _as_named(field: pa.Field, above: str, texts: Collection[str]) -> pa.Field:
    """Return the field as text instead of a time if ``texts`` has its name or a parent's name."""
    path, kind = above + field.name, field.type
    if pa.types.is_timestamp(kind) and path in texts:
        return field.with_type(pa.string())
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_as_named(each, f"{path}.", texts) for each in kind]))
    return field


def _with_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace empty texts by null."""
    arrays = [
        pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
        if pa.types.is_string(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _any(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def is_number(word: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True

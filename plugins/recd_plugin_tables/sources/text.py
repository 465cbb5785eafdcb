"""CSV, TSV and JSON lines, whose types are those of the first rows."""

from __future__ import annotations

import csv
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
    open_stream,
    set_option,
    with_compressed,
)
from recd_plugins.api import DataError, Location

#: Bytes of a block; the first one shows the types of columns.
_BLOCK = 8 << 20
# Bytes that names of columns are looked for in; the module csv takes no longer ones.
_LINE = 1 << 17
# What an integer would lose a zero of.
_CODE = r"^-?0\d"
# What a float would round, unless it is an amount, as others with fractions show.
_LARGE = r"^-?\d{19,}$"
_FRACTION = r"[.,]|\d[eE]"
# Lists and objects inside one another. Arrow's inference of types crashes the process at 100,000,
# and its files take no more than this.
_DEEPEST = 64
_JSON_STRING = rb'"(?:[^"\\]|\\.)*"'
# At the end of a time: what zone it is of.
_OFFSET = r":\d\d(Z|[+-]\d\d(:?\d\d)?)$"


class CsvFormat(FileFormat):
    """Text in lines whose columns are separated by one character.

    An empty place is null. ``NA`` and ``null`` are in columns of numbers, and words elsewhere.
    Whole numbers are text where one has a zero in front, as codes have: 01234 is not 1234; and
    where one has more than 64 bits, as a float would round it.
    """

    name = "csv"
    suffixes = with_compressed([".csv"])
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
        self._types = {name: pa.type_for_alias(kind) for name, kind in types.items()}

    def schema(self, file: Location) -> pa.Schema:
        with open_stream(file) as source, self._open(source, self._types) as reader:
            found = reader.schema
        if unknown := sorted(set(self._needed) - set(found.names)):
            raise DataError(
                f"{file}: no column {unknown[0]}, which option types names; there are: "
                f"{', '.join(found.names)}"
            )
        self._check_names(file, found)
        # What is no UTF-8 pyarrow takes for bytes, whose ids are others than those of the text.
        for field in found:
            if pa.types.is_binary(field.type) and field.name not in self._types:
                raise DataError(
                    f"{file}: column {field.name} has text that is not UTF-8; write the file anew, "
                    "as by iconv -f latin1 -t utf-8, or set source.types: "
                    f"{{{field.name}: binary}} where it is no text"
                )
        codes = set(self._codes(file, found))
        return pa.schema([f.with_type(pa.string()) if f.name in codes else f for f in found])

    def _codes(self, file: Location, found: pa.Schema) -> Iterator[str]:
        """The columns of whole numbers of which the first block has one that no number keeps."""
        kinds = {f.name: f.type for f in found if f.name not in self._types}
        texts = {
            name: pa.string()
            for name, kind in kinds.items()
            if pa.types.is_integer(kind) or pa.types.is_floating(kind)
        }
        if not texts:
            return
        with open_stream(file) as source, self._open(source, texts, list(texts)) as reader:
            for batch in islice(reader, 1):
                for name, column in zip(texts, batch.columns, strict=True):
                    if pa.types.is_integer(kinds[name]):
                        found_one = _any(column, _CODE)
                    else:
                        found_one = _any(column, _LARGE) and not _any(column, _FRACTION)
                    if found_one:
                        yield name

    def read(
        self, file: Location, schema: pa.Schema, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        types = {name: schema.field(name).type for name in columns}
        # An empty row behind the last one. A quote that is never closed takes it into its value,
        # with all rows in between, and Arrow says nothing.
        empty = self._separator * (len(schema) - 1) or '""'
        with (
            open_stream(file) as source,
            pa.PythonFile(_Extended(source, f"\n{empty}\n".encode()), mode="r") as extended,
            self._open(extended, types, columns) as reader,
        ):
            num_rows = 0
            last = reader.read_next_batch()
            for batch in reader:
                num_rows += last.num_rows
                yield _with_nulls(last)
                last = batch
            num_rows += last.num_rows - 1
            last = _with_nulls(last)
            if any(column[-1].as_py() not in (None, b"", "") for column in last.columns):
                raise DataError(
                    f"{file}: row {num_rows} (from 0) has an unclosed quote; close it, or write "
                    "the file again if it was truncated"
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
            # One thread: errors then name the row.
            pc_csv.ReadOptions(block_size=_BLOCK, column_names=self._header, use_threads=False),
            pc_csv.ParseOptions(delimiter=self._separator, newlines_in_values=True),
            pc_csv.ConvertOptions(
                column_types=dict(types),
                include_columns=list(columns) if columns else None,
                decimal_point=self._decimal,
            ),
        )

    def _check_names(self, file: Location, schema: pa.Schema) -> None:
        names = schema.names
        if self._header is not None:
            with open_stream(file) as source:
                lines = source.read(_LINE).splitlines()  # Arrow also splits at a lone return
            line = lines[0].decode("utf-8-sig", errors="replace") if lines else ""
            if next(csv.reader([line], delimiter=self._separator), []) == self._header:
                raise DataError(
                    f"{file}: the first line names the columns, as option header does, and would "
                    "be a row: leave header out (recd predict: "
                    "dataset.options.source.header=null), or the line"
                )
        elif names and all(map(_is_number, names)):
            raise DataError(
                f"{file}: the first line holds {', '.join(names[:4])}, which are no names of "
                "columns; name them by option header (recd init: --header)"
            )
        others = [each for each in ";\t|," if each != self._separator and each in names[0]]
        if len(names) == 1 and others:
            raise DataError(
                f"{file}: the only column is {names[0]!r}; "
                f"{set_option('separator', repr(others[0]))}"
            )


class TsvFormat(CsvFormat):
    """The same with tabs."""

    name = "tsv"
    suffixes = with_compressed([".tsv", ".tab"])
    separator = "\t"


class JsonLinesFormat(FileFormat):
    """A JSON object a line."""

    name = "jsonl"
    suffixes = with_compressed([".jsonl", ".ndjson", ".json"])

    def __init__(self, types: Mapping[str, str], texts: Collection[str] = ()) -> None:
        self._types = {name: pa.type_for_alias(kind) for name, kind in types.items()}
        self._texts = texts

    def schema(self, file: Location) -> pa.Schema:
        with open_stream(file) as source:
            start = source.read(_BLOCK)
        if start.startswith(b"["):
            raise DataError(
                f"{file}: this is one JSON array; write its objects one a line, without the "
                "brackets and the commas between them"
            )
        for row, line in enumerate(start.splitlines()):
            if (levels := _levels(line)) > _DEEPEST:
                raise DataError(
                    f"{file}: row {row} (from 0) is nested {levels:,} levels deep; at most "
                    f"{_DEEPEST} are supported; flatten it"
                )
        fields = [pa.field(name, kind) for name, kind in self._types.items()]
        with open_stream(file) as source:
            found = _open_json(source, pa.schema(fields), "infer").schema
        found = pa.schema([_no_time(field, "", self._texts) for field in found])
        times = pa.schema([each.with_type(_as_text(each.type)) for each in found])
        if times == found:
            return found
        # Where Arrow infers times it takes offsets into account, and forgets that there were any.
        with open_stream(file) as source:
            texts = _open_json(source, times, "ignore").read_next_batch()
        return pa.schema(
            [each.with_type(_with_zone(each.type, texts[each.name])) for each in found]
        )

    def read(
        self,
        file: Location,
        schema: pa.Schema,
        columns: Sequence[str],  # noqa: ARG002
    ) -> Iterator[pa.RecordBatch]:
        with open_stream(file) as source:
            yield from _open_json(source, schema, "error")


class _Extended(io.RawIOBase):
    """A readable file: the bytes of a stream, followed by ``more``."""

    def __init__(self, source: pa.NativeFile, more: bytes) -> None:
        self._source, self._more = source, more

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if found := self._source.read(None if size < 0 else size):
            return bytes(found)
        found, self._more = self._more, b""
        return found


def _levels(line: bytes) -> int:
    if line.count(b"[") + line.count(b"{") <= _DEEPEST:
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


def _no_time(field: pa.Field, above: str, texts: Collection[str]) -> pa.Field:
    """The same field, of which those that are named, by their path, are texts and no times."""
    path, kind = above + field.name, field.type
    if pa.types.is_timestamp(kind) and path in texts:
        return field.with_type(pa.string())
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_no_time(each, f"{path}.", texts) for each in kind]))
    return field


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The same type with texts in place of times without a zone."""
    if pa.types.is_timestamp(kind) and kind.tz is None:
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_as_text(each.type)) for each in kind])
    return pa.list_(_as_text(kind.value_type)) if pa.types.is_list(kind) else kind


def _with_zone(kind: pa.DataType, values: pa.Array) -> pa.DataType:
    """The same type with UTC for times of which a text has an offset."""
    if pa.types.is_timestamp(kind) and pa.types.is_string(values.type):
        offset = pc.any(pc.match_substring_regex(values, _OFFSET)).as_py()
        return pa.timestamp(kind.unit, "UTC") if offset else kind
    if pa.types.is_struct(kind):
        return pa.struct(
            [each.with_type(_with_zone(each.type, values.field(each.name))) for each in kind]
        )
    if pa.types.is_list(kind):
        return pa.list_(_with_zone(kind.value_type, values.flatten()))
    return kind


def _any(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _with_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with nulls in place of empty texts."""
    columns = [
        pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
        if pa.types.is_string(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

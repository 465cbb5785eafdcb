"""Writer of Parquet files whose row groups contain complete sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from recd_plugins.data.list_dict import (
    Layout,
    id_features,
    is_id_list,
    is_list_dict,
    list_dict_field,
    to_list_dict,
    to_lists,
)
from recd_plugins.data.parquet import FOOTER_KEY
from recd_plugins.data.statistics import StatisticsAccumulator
from recd_plugins.interfaces.rows import Origin, Rows, SessionKeys
from recd_plugins.runtime.errors import DataError

#: Whether null lists are errors or become empty lists.
Nulls = Literal["error", "empty"]

_MB = 1 << 20
# Use ``list_dict`` if plain lists take this many times its bytes.
_MIN_FACTOR = 1.5


class TableWriter:
    """Context manager that writes a Parquet file. The file appears at ``path`` when complete.

    Row groups have at most ``row_group_rows`` rows and end at the end of a session. Only longer
    sessions are split. Columns with lists of integers are features; the file footer contains their
    duplication statistics.

    Args:
        schema: schema of the rows; its metadata is written to the file.
        keys: session and time columns; None writes row groups of ``row_group_rows`` rows and no
            statistics.
        layout: layout of all features, or a dict from feature to layout. ``list_dict`` stores each
            distinct list once, except for features with few duplicates in the first row group.
        nulls: ``empty`` writes null lists as empty lists. A null inside a list is always an error.
        source: name of the file that the rows come from, for error messages.

    Raises:
        DataError: a column is missing or has the wrong type or nulls, or writing fails.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        keys: SessionKeys | None,
        layout: Layout | Mapping[str, Layout] = "list",
        row_group_rows: int = 8192,
        metadata: Mapping[bytes, bytes] | None = None,
        nulls: Nulls = "error",
        compression_level: int = 3,
        source: Path | None = None,
    ) -> None:
        self.path = path
        self._source = source or path
        self._features = id_features(schema)
        self._columns = list(schema.names)
        self._metadata = {**(schema.metadata or {}), **(metadata or {})}
        self._schema, self._keys, self._nulls = schema, keys, nulls
        self._compression_level = compression_level
        self._row_group_rows = row_group_rows
        self._layouts: dict[str, Layout] | None = None
        if layout == "list":
            self._layouts = dict.fromkeys(self._features, layout)
        elif layout != "list_dict":
            self._layouts = {name: layout.get(name, "list") for name in self._features}
        self._statistics: StatisticsAccumulator | None = None
        if keys is not None:
            self._statistics = StatisticsAccumulator(schema, keys, self._features)
            self._metadata.pop(FOOTER_KEY, None)
        self._scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self._writer: pq.ParquetWriter | None = None
        self.num_rows = 0

    @property
    def layouts(self) -> dict[str, Layout]:
        """Return a dict from feature to layout, final after the first row group is written."""
        return dict(self._layouts or {})

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch of rows to the file.

        Raises:
            DataError: a list contains a null, or the disk is full.
        """
        if batch.num_rows:
            self._waiting.append(batch)
            self._num_waiting += batch.num_rows
        while self._num_waiting > self._row_group_rows:
            self._flush(self._end_of_group())

    def close(self) -> None:
        """Write the remaining rows and move the file to its path."""
        try:
            if self._num_waiting or self._writer is None:
                self._flush(self._num_waiting)
            assert self._writer is not None
            if self._statistics is not None:
                statistics = json.dumps(self._statistics.result().to_json())
                self._writer.add_key_value_metadata({FOOTER_KEY.decode(): statistics})
            self._writer.close()
            os.replace(self._scratch, self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the unfinished file."""
        if self._writer is not None and self._writer.is_open:
            # Closing writes a footer, which fails on a full disk.
            with suppress(OSError):
                self._writer.close()
        with suppress(OSError):
            self._scratch.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _end_of_group(self) -> int:
        """Return the largest number of buffered rows that ends at the end of a session."""
        size = self._row_group_rows
        if self._keys is None:
            return size
        sessions = pa.Table.from_batches(self._waiting)[self._keys.session].slice(0, size + 1)
        changes = pc.not_equal(sessions.slice(1), sessions.slice(0, size))
        ends = pc.indices_nonzero(changes.fill_null(True))
        return int(ends[-1].as_py()) + 1 if len(ends) else size

    def _flush(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting = table.slice(num_rows).to_batches()
        self._num_waiting -= num_rows
        group = table.slice(0, num_rows).combine_chunks()
        lists = {name: self._lists(name, group[name]) for name in self._features}
        if self._statistics is not None and self._keys is not None and num_rows:
            origin = Origin(str(self._source), self.num_rows, num_rows)
            sessions = group[self._keys.session].chunk(0)
            rows = pa.RecordBatch.from_pydict({**lists, self._keys.session: sessions})
            self._statistics.add(Rows(rows, (origin,)))
        if self._layouts is None:
            self._layouts = {}
            for name, column in lists.items():
                self._layouts[name] = "list_dict" if _pays(column) else "list"
        columns = [
            self._in_layout(name, lists[name], self._layouts[name])
            if name in lists
            else group[name]
            for name in self._columns
        ]
        if self._writer is None:
            self._writer = self._open(self._layouts)
        if num_rows:
            data = pa.Table.from_arrays(columns, schema=self._writer.schema)
            self._writer.write_table(data, row_group_size=num_rows)
            self.num_rows += num_rows

    def _lists(self, name: str, column: pa.ChunkedArray) -> pa.Array:
        """Return a feature column of a row group as lists. Raises DataError for nulls."""
        lists = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        assert len(lists) == len(column), "a row group has fewer than 2^31 ids of a feature"
        if is_list_dict(self._schema.field(name)):
            lists = to_lists(lists)
        if pt.is_large_list(lists.type):
            lists = lists.cast(pa.list_(lists.type.value_type))
        if lists.null_count and self._nulls == "error":
            row = int(lists.is_null().to_numpy(zero_copy_only=False).argmax())
            advice = "the list is null. Write an empty list, or use --nulls empty"
            raise self._at(row, name, advice)
        lists = lists.fill_null(pa.scalar([], lists.type)) if lists.null_count else lists
        used = lists.flatten()
        if used.null_count:
            bad = int(used.is_null().to_numpy(zero_copy_only=False).argmax())
            ends = np.cumsum(lists.value_lengths().to_numpy())
            row = int(np.searchsorted(ends, bad, "right"))
            raise self._at(row, name, "the list contains a null. Fill or drop nulls")
        return lists

    def _at(self, row: int, name: str, what: str) -> DataError:
        return DataError(
            f"{self._source}: row {self.num_rows + row} (from 0), column {name!r}: {what}"
        )

    def _in_layout(self, name: str, lists: pa.Array, layout: Layout) -> pa.Array:
        if layout == "list_dict":
            return to_list_dict(lists)
        lists = lists if lists.offset == 0 and not lists.null_count else pa.concat_arrays([lists])
        kind = _list_type(pa.field(name, lists.type))
        return pa.ListArray.from_arrays(lists.offsets, lists.values, type=kind)

    def _open(self, layouts: Mapping[str, Layout]) -> pq.ParquetWriter:
        fields = [_stored_field(self._schema.field(name), layouts) for name in self._columns]
        packed = [name for name, layout in layouts.items() if layout == "list_dict"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return pq.ParquetWriter(
            self._scratch,
            pa.schema(fields, metadata=self._metadata),
            compression="zstd",
            compression_level=self._compression_level,
            # Dictionary encoding makes clustered lists larger, since zstd already finds the
            # repeats.
            use_dictionary=packed,
            dictionary_pagesize_limit=1 << 30,
            data_page_size=_MB,
            write_page_checksum=True,
            write_statistics=[name for name in self._columns if name not in layouts],
        )


def _pays(lists: pa.Array) -> bool:
    """Return whether layout ``list_dict`` would make the column much smaller."""
    packed = to_list_dict(lists)
    distinct = pc.sum(pc.binary_length(pc.unique(packed))).as_py() or 0
    every = pc.sum(pc.binary_length(packed)).as_py() or 0
    return bool(every and every >= _MIN_FACTOR * (distinct + 4 * len(packed)))


def _stored_field(field: pa.Field, layouts: Mapping[str, Layout]) -> pa.Field:
    layout = layouts.get(field.name)
    if layout is None:
        return field
    if layout == "list_dict":
        return list_dict_field(field.name)
    metadata = field.metadata if is_id_list(field.type) else None
    return pa.field(field.name, _list_type(field), nullable=False, metadata=metadata)


def _list_type(field: pa.Field) -> pa.DataType:
    ids = field.type.value_type if is_id_list(field.type) else pa.int64()
    return pa.list_(pa.field("element", ids, nullable=False))

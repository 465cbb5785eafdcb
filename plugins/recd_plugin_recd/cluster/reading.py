"""The rows of a partition as they come: sessions that stay, features as lists."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from recd_plugin_recd.cluster.downsample import sessions_kept
from recd_plugin_recd.cluster.gather import copied_share
from recd_plugin_recd.cluster.keys import check_values
from recd_plugin_recd.cluster.memory import BATCH_BYTES, RowSize
from recd_plugin_recd.cluster.options import ClusterOptions
from recd_plugin_recd.source import ParquetSource, Partition, SessionTable
from recd_plugins.api import DataError, Origin, Rows
from recd_plugins.api.tables import check_int96, int96_columns, is_id_list, is_list_dict, to_lists

_LISTS = pa.list_(pa.int64())
_FIRST_ROWS, _MOST_ROWS = 256, 1 << 16
_KEY_ROWS = 1 << 16
#: Read from a file at once, for each column: row groups may be larger than the memory.
_FILE_BUFFER = 1 << 20


class Input:
    """Reads one partition of a source, any number of times.

    Attributes:
        schema: of the rows; features in layout ``list_dict`` are lists here.
    """

    def __init__(self, source: SessionTable, partition: Partition, options: ClusterOptions) -> None:
        self._source, self._partition, self._options = source, partition, options
        self._keys = source.keys
        self.schema = pa.schema([as_lists(field) for field in source.schema])
        for field in source.schema:
            if _has_views(field.type):
                path = partition.files[0] if partition.files else source.path
                raise DataError(
                    f"{path}: column {field.name!r} is {field.type}, of whose views Arrow takes no "
                    "rows in another order; write it as string or binary"
                )
        self._row_bytes = self._copied_share = 0.0

    @property
    def row_size(self) -> RowSize:
        """The size of the rows that were read so far."""
        return RowSize(self._row_bytes, self._copied_share)

    def peek(self) -> bool:
        """Measure the first rows; False where there are none.

        Raises:
            DataError: what ``rows`` raises.
        """
        with closing(self._read(None)) as rows:
            first = next(rows, None)
        if first is None:
            return False
        data = self._normal(first)
        self._measure(data)
        self._copied_share = copied_share(data)
        return True

    def sessions_and_times(self) -> Iterator[tuple[Any, Any]]:
        """Sessions and times of the rows that stay, two arrays a batch.

        Raises:
            DataError: a session or a time is null, or a file is damaged.
        """
        columns = list(dict.fromkeys((self._keys.session, self._keys.timestamp)))
        for rows in self._read(columns):
            check_values(rows, self._keys)
            kept = self._kept(rows.data)
            yield kept.column(self._keys.session), kept.column(self._keys.timestamp)

    def rows(self, read: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
        """The rows that stay, in the order of the input; ``read`` is told of all.

        Raises:
            DataError: a feature has a null, or a file is damaged.
        """
        for rows in self._read(None):
            data = self._normal(rows)
            self._measure(data)
            read(data.num_rows)
            kept = self._kept(data)
            if kept.num_rows:
                yield kept

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._options.keep_share >= 1:
            return batch
        sessions = batch.column(self._keys.session)
        return batch.filter(
            pa.array(sessions_kept(sessions, self._options.keep_share, self._options.seed))
        )

    def _measure(self, batch: pa.RecordBatch) -> None:
        """Follow rows that grow at once, those that shrink slowly."""
        if batch.num_rows:
            size = batch.nbytes / batch.num_rows
            self._row_bytes = max(size, 0.9 * self._row_bytes + 0.1 * size)

    def _normal(self, rows: Rows) -> pa.RecordBatch:
        """With the columns and types of ``schema``."""
        columns = []
        for field in self._source.schema:
            column = rows.data.column(field.name)
            target = self.schema.field(field.name)
            try:
                if is_list_dict(field):
                    column = to_lists(column)
                elif column.type != target.type:
                    column = column.cast(target.type)
            except ValueError as error:
                path, number = rows.origin_of(0)
                raise DataError(
                    f"{path}: column {field.name!r}, from row {number} on: {error}"
                ) from error
            if is_id_list(target.type):
                self._check_nulls(rows, field.name, column)
            columns.append(column)
        return pa.record_batch(columns, schema=self.schema)

    def _check_nulls(self, rows: Rows, name: str, lists: Any) -> None:
        row = None
        if lists.null_count and self._options.nulls == "error":
            row = int(lists.is_null().to_numpy(zero_copy_only=False).argmax())
            what = "the list is null; write an empty one, or let --nulls empty make it one"
        elif lists.values.null_count and (items := lists.flatten()).null_count:
            item = int(items.is_null().to_numpy(zero_copy_only=False).argmax())
            ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy())
            row = int(np.searchsorted(ends, item, "right"))
            what = "a null in the list; write lists without nulls"
        if row is not None:
            path, number = rows.origin_of(row)
            raise DataError(f"{path}: row {number} (from 0), column {name!r}: {what}")

    def _read(self, columns: Sequence[str] | None) -> Generator[Rows, None, None]:
        if isinstance(self._source, ParquetSource):
            for path in self._partition.files:
                yield from self._read_file(path, columns)
        else:
            yield from self._source.read(self._partition, columns)

    def _read_file(self, path: Path, columns: Sequence[str] | None) -> Iterator[Rows]:
        row = 0
        try:
            with pq.ParquetFile(
                path, buffer_size=_FILE_BUFFER, page_checksum_verification=True
            ) as file:
                int96 = int96_columns(file.metadata)
                if columns is not None:
                    int96 = [name for name in int96 if name in columns]
                for group in range(file.metadata.num_row_groups):
                    check_int96(path, file.metadata, group, int96, path)
                    for batch in file.iter_batches(
                        self._batch_rows(columns), row_groups=[group], columns=columns
                    ):
                        origin = Origin(str(path), row, batch.num_rows)
                        row += batch.num_rows
                        yield Rows(batch, (origin,))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read, from row {row} on: {error}") from error

    def _batch_rows(self, columns: Sequence[str] | None) -> int:
        if columns is not None:
            return _KEY_ROWS
        if not self._row_bytes:
            return _FIRST_ROWS
        return min(max(int(BATCH_BYTES / self._row_bytes), 1), _MOST_ROWS)


def as_lists(field: pa.Field) -> pa.Field:
    """The field of a column of ``Input``."""
    return pa.field(field.name, _LISTS) if is_list_dict(field) else field


def _has_views(kind: pa.DataType) -> bool:
    if pt.is_dictionary(kind):
        return _has_views(kind.value_type)
    inside = (kind.field(number).type for number in range(kind.num_fields))
    return pt.is_string_view(kind) or pt.is_binary_view(kind) or any(map(_has_views, inside))

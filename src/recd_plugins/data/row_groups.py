"""Work items of reading: a split says by itself which rows to read from where, and how.

As the splits of a data set in Meta's ingestion (arXiv 2108.09373, section on the DPP master): a
reader has no state and needs nothing but a split, so any process on any machine can read any one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recd_plugins.data.buffered_file import BufferedFile, ReadOptions, column_ranges
from recd_plugins.data.file_identity import check_unchanged, look_at, replaced
from recd_plugins.data.int96 import check_int96, int96_columns
from recd_plugins.data.list_dict import decoded_field, is_list_dict
from recd_plugins.data.row_filter import Condition, RowFilter
from recd_plugins.data.storage import Location
from recd_plugins.errors import DataError
from recd_plugins.interfaces import Origin, Rows

# Rows decoded at once: more costs page faults, less costs calls.
_DECODE_ROWS = 2048
# With dictionaries, which are built anew for every batch: whole row groups, if they are not huge.
_DECODE_DICTIONARY_ROWS = 16_384
# Of names in a damaged footer pyarrow raises the last.
_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


@dataclass(frozen=True)
class RowGroup:
    """Rows of one row group. It can be pickled.

    Attributes:
        file: where the row group is.
        group: its index in the file.
        first_row: 0-based row of the file with which it begins.
        group_rows: its rows.
        num_rows: those of them that ``where`` keeps.
        stretches: which of these are read, pairs of the first and how many, ascending.
        columns: names and types of what is read, ``list_dict`` as dictionaries.
        where: conditions that all have to hold.
        options: how columns are read.
    """

    file: Location
    group: int
    first_row: int
    group_rows: int
    num_rows: int
    stretches: tuple[tuple[int, int], ...]
    columns: pa.Schema
    where: tuple[Condition, ...] = ()
    options: ReadOptions = field(default_factory=ReadOptions)


def read_splits(splits: Iterable[RowGroup]) -> Generator[Rows, None, None]:
    """The rows of splits in their order, in batches of any size that are of one stretch each.

    A file is open from the first to the last of the splits of it that follow each other, and for
    this iterator alone: nothing outlives it, nothing is shared between threads.

    Raises:
        DataError: a file cannot be decoded or was replaced after the split was made, or a value
            does not fit its type.
        SetupError: the store of a file cannot be reached, or refuses.
    """
    for (location, options), run in groupby(splits, key=lambda split: (split.file, split.options)):
        first, rest = _peek(run)
        with OpenFile(location, first.columns, options) as file:
            for split in rest:
                yield from _read(file, split)


class OpenFile:
    """A Parquet file that is read row group by row group. Use as a context manager.

    That it is the file that ``location`` was made of is looked at when it is opened, and that it
    still is after it was read: a local file after each row group, another one at the end.

    Args:
        location: the file.
        columns: what will be read of it; dictionaries come as such.
        options: how columns are read.

    Raises:
        DataError: it is no Parquet file, not there, or another one.
        SetupError: its store cannot be reached, or refuses.
    """

    def __init__(self, location: Location, columns: pa.Schema, options: ReadOptions) -> None:
        try:
            with location.told():
                source = location.open()
                try:
                    metadata, self.location = look_at(location, source)
                except BaseException:
                    source.close()
                    raise
                self._file = source
                self._buffered = None
                if options.pre_buffer:
                    is_local = location.local is not None
                    self._buffered = BufferedFile(source, options, is_local=is_local)
                    source = pa.PythonFile(self._buffered, mode="r")
                self._source = source
                self.parquet = pq.ParquetFile(
                    source,
                    metadata=metadata,
                    read_dictionary=dictionaries(columns),
                    page_checksum_verification=True,
                    pre_buffer=False,
                )
                self._int96 = int96_columns(metadata)
        except _UNREADABLE as error:
            raise DataError(f"{location}: no readable Parquet file: {error}") from error

    def batches(
        self, group: int, names: Sequence[str], num_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """The columns ``names`` of a row group, ``num_rows`` at once, in the order of the file.

        Raises:
            DataError: it cannot be decoded, a time is none that Arrow has, or a local file was
                changed meanwhile.
            SetupError: the store cannot be reached, or refuses.
        """
        try:
            with self.location.told():
                metadata = self.parquet.metadata
                if self._buffered is not None:
                    self._buffered.load(column_ranges(metadata.row_group(group), names))
                if int96 := [name for name in names if name in self._int96]:
                    check_int96(self._source, metadata, group, int96, self.location)
                for batch in self.parquet.iter_batches(
                    num_rows, row_groups=[group], columns=list(names), use_threads=False
                ):
                    self._check_codes(group, batch)
                    yield batch
                if self.location.local is not None:
                    check_unchanged(self.location, self._file)
        except _UNREADABLE as error:
            raise DataError(
                f"{self.location}: row group {group} cannot be read: {error}"
            ) from error

    def _check_codes(self, group: int, batch: pa.RecordBatch) -> None:
        """The header of a dictionary's page, which no checksum guards, may say that it is shorter.

        Nothing behind this looks whether a code has a value.
        """
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if not pa.types.is_dictionary(column.type) or not len(column):
                continue
            code, num_values = pc.max(column.indices).as_py(), len(column.dictionary)
            if code is not None and code >= num_values:
                raise DataError(
                    f"{self.location}: row group {group} cannot be read: column {name} has the "
                    f"code {code}, and its dictionary has {num_values} values; the table is "
                    "damaged, write it anew"
                )

    def rows_of(self, group: int) -> int:
        """Rows of a row group, 0 where there is none."""
        metadata = self.parquet.metadata
        return metadata.row_group(group).num_rows if group < metadata.num_row_groups else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._look_again()
        finally:
            self.parquet.close(force=True)
            self._source.close()
            if self._buffered is not None:
                self._buffered.close()

    def _look_again(self) -> None:
        if self.location.local is not None:
            check_unchanged(self.location, self._file)
            return
        # The requests that an object was read by may have met different ones.
        try:
            with self.location.told(), self.location.open() as source:
                check_unchanged(self.location, source)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.location}: cannot be looked at again: {error}") from error


def handed_out(metadata: pq.FileMetaData) -> pa.Schema:
    """The columns of a file as they are handed out."""
    return pa.schema([decoded_field(field) for field in metadata.schema.to_arrow_schema()])


def dictionaries(schema: pa.Schema) -> list[str]:
    """The columns in layout ``list_dict``."""
    return [field.name for field in schema if is_list_dict(field)]


def _peek(run: Iterator[RowGroup]) -> tuple[RowGroup, Iterator[RowGroup]]:
    first = next(run)

    def all_of_them() -> Iterator[RowGroup]:
        yield first
        yield from run

    return first, all_of_them()


def _read(file: OpenFile, split: RowGroup) -> Iterator[Rows]:
    if (num_rows := file.rows_of(split.group)) != split.group_rows:
        what = f" (row group {split.group} had {split.group_rows} rows and has {num_rows})"
        raise replaced(split.file, what)
    schema, names = split.columns, list(split.columns.names)
    row_filter = None
    if split.where:
        row_filter = RowFilter(split.where, handed_out(file.parquet.metadata), split.file)
        names += [name for name in row_filter.columns if name not in names]
    # Rows that the filter has kept so far, and rows of the row group.
    row, group_row = 0, 0
    stop = sum(split.stretches[-1])
    decoded = _DECODE_DICTIONARY_ROWS if dictionaries(schema) else _DECODE_ROWS
    with closing(file.batches(split.group, names, decoded)) as batches:
        for batch in batches:
            origin = Origin(str(split.file), split.first_row + group_row, batch.num_rows)
            group_row += batch.num_rows
            if row_filter is not None:
                mask = row_filter.mask(batch)
                origin = _kept(origin, mask)
                batch = batch.filter(mask) if origin.num_rows < batch.num_rows else batch
            for skip, num_rows in split.stretches:
                first = max(row, skip)
                last = min(row + batch.num_rows, skip + num_rows)
                if first < last:
                    data = batch.slice(first - row, last - first)
                    mine = origin.slice(first - row, last - first)
                    yield Rows(_cast(data, schema, mine), (mine,))
            row += batch.num_rows
            if row >= stop and group_row < split.group_rows:
                return
    if row != split.num_rows:
        what = f"{row} rows of row group {split.group} were read, {split.num_rows} were expected"
        raise replaced(split.file, f", or it is damaged ({what})")


def _kept(origin: Origin, mask: pa.BooleanArray) -> Origin:
    kept = np.flatnonzero(mask.to_numpy(zero_copy_only=False)) + origin.first_row
    if not len(kept):
        return Origin(origin.path, origin.first_row, 0)
    first, last = int(kept[0]), int(kept[-1])
    adjacent = last - first + 1 == len(kept)
    return Origin(origin.path, first, len(kept), None if adjacent else pa.array(kept))


def _cast(data: pa.RecordBatch, schema: pa.Schema, origin: Origin) -> pa.RecordBatch:
    # Projection keeps the order of the file.
    columns: Sequence[pa.Array] = [data.column(name) for name in schema.names]
    cast = []
    for wanted, column in zip(schema, columns, strict=True):
        try:
            cast.append(column if column.type == wanted.type else column.cast(wanted.type))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{origin.path}: column {wanted.name}, rows {origin.first_row} to "
                f"{origin.row(origin.num_rows - 1)}: {error}"
            ) from error
    return pa.record_batch(cast, schema=schema)

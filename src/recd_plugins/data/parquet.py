"""Reader of tables in Parquet files, on local disks or in an object store."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.types as pt

from recd_plugins.data.list_dict import decoded_field, is_list_dict
from recd_plugins.data.reader import Piece, Unit
from recd_plugins.data.row_filter import Condition, RowFilter, holds_for_key
from recd_plugins.data.storage import Location
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.interfaces.data_profile import TableStatistics
from recd_plugins.interfaces.rows import Storage
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.files import parse_json

#: Key in a Parquet footer; its value is the file's ``TableStatistics`` as JSON.
FOOTER_KEY = b"recd.statistics"

# Number of files of an object store that are read in parallel.
_FILES_AT_ONCE = 16
# Rows decoded at once. More rows cost page faults, fewer cost calls. Dictionary columns decode
# whole row groups, since each batch rebuilds the dictionary.
_DECODE_ROWS, _DECODE_DICTIONARY_ROWS = 2048, 16_384
# A damaged column name in a footer raises UnicodeError.
_UNREADABLE = (pa.ArrowException, OSError, UnicodeError)
# Bytes to read first from the end of a file, and bytes behind its footer.
_TAIL, _ENDING = 1 << 16, 8
_FOOTER = "footer"
# The folder name of a Hive partition whose key is null.
_NULL_KEY = "__HIVE_DEFAULT_PARTITION__"


class ParquetTable:
    """A Parquet file, or all ``*.parquet`` files below a folder, sorted by name.

    Names that start with ``_`` or ``.`` are skipped. Hive partition keys are not read as
    columns, but conditions may use the keys. Columns in layout ``list_dict`` are read as Arrow
    dictionaries.

    Args:
        path: a local path, or a URL.
        storage: access options for the object store of a URL.
        where: conditions on columns or Hive partition keys that rows must meet. Files in other
            partitions are not opened.

    Raises:
        DataError: a file is missing or not Parquet, or two files have different columns. Or a
            condition has an unknown column or a value of the wrong type.
        SetupError: the store cannot be reached, or denies access.
    """

    def __init__(
        self, path: Path | str, storage: Storage | None = None, *, where: Sequence[Condition] = ()
    ) -> None:
        self.path = path
        self.root = Location(path, storage or Storage())
        found = self.root.find(".parquet")
        self.schema = _decoded_schema(read_metadata(found[0]))
        counts = Counter(self.schema.names)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise DataError(f"{found[0]}: two columns are named {twice[0]!r}. Rename one of them")
        on_columns = [each for each in where if each.column in self.schema.names]
        chosen = self._with_keys(found, [each for each in where if each not in on_columns])
        self._filter = RowFilter(on_columns, self.schema, found[0]) if on_columns else None
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            looked = list(threads.map(_look, chosen))
        self._metadata, self.locations = map(list, zip(*looked, strict=True))
        mine = _kinds(self.schema)
        for location, metadata in zip(self.locations, self._metadata, strict=True):
            kinds = _kinds(_decoded_schema(metadata))
            for name in {**mine, **kinds}:
                one, two = mine.get(name, "missing"), kinds.get(name, "missing")
                if one != two:
                    raise DataError(
                        f"column {name!r} is {one} in {found[0]}, but {two} in {location}. Write "
                        "all files of the table with the same columns"
                    )

    @property
    def files(self) -> list[Path]:
        """Return the paths of the files of a local table."""
        return [file for location in self.locations if (file := location.local) is not None]

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Row groups with rows that meet the conditions. Conditions on columns read the data."""
        counts = [[rows for _, rows in groups] for groups in self._groups]
        if self._filter is not None:
            with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
                counts = list(threads.map(partial(_count, self._filter), self.locations))
        units = (
            Unit(number, group, first_row, counts[number][group])
            for number, groups in enumerate(self._groups)
            for group, (first_row, _) in enumerate(groups)
        )
        return tuple(unit for unit in units if unit.num_rows)

    def identity(self) -> list[list[str | int]]:
        """Return ``[path, footer digest, row counts...]`` of every file, as JSON values."""
        rows: list[list[str | int]] = [
            [location.below(self._top), str(dict(location.seen)[_FOOTER])]
            for location in self.locations
        ]
        for unit in self.units:
            rows[unit.file].append(unit.num_rows)
        return rows

    def contents(self) -> dict[str, dict[str, int | str | None]]:
        """Return a dict from each file's relative path to its size and footer digest."""
        found: dict[str, dict[str, int | str | None]] = {}
        for location, footer in zip(self.locations, self._metadata, strict=True):
            sink = io.BytesIO()
            footer.write_metadata_file(sink)
            digest = hashlib.sha256(sink.getbuffer()).hexdigest()
            found[location.below(self._top)] = {"bytes": location.size, "footer": digest}
        return found

    def read(self, pieces: Iterable[Piece], schema: pa.Schema) -> Generator[Rows, None, None]:
        """Read pieces (ranges of rows) in order, with the columns and types of ``schema``.

        Yields:
            Rows of one piece, in batches of any size.

        Raises:
            DataError: a file was replaced since this table was opened, or is damaged.
        """
        for number, in_file in groupby(pieces, key=lambda piece: piece.unit.file):
            with _open(self.locations[number], schema) as (file, check):
                for unit, in_unit in groupby(in_file, key=lambda piece: piece.unit):
                    ranges = [(piece.skip, piece.num_rows) for piece in in_unit]
                    yield from self._read(file, unit, ranges, schema)
                    check()

    def _read(
        self,
        file: pq.ParquetFile,
        unit: Unit,
        ranges: Sequence[tuple[int, int]],
        schema: pa.Schema,
    ) -> Iterator[Rows]:
        """Read ``(first row, number of rows)`` ranges, counted over rows that pass the filter."""
        location, num_rows = self.locations[unit.file], self._groups[unit.file][unit.group][1]
        names = list(schema.names)
        if self._filter is not None:
            names += [name for name in self._filter.columns if name not in names]
        decoded = _DECODE_DICTIONARY_ROWS if any(map(is_list_dict, schema)) else _DECODE_ROWS
        # Number of rows so far that passed the filter, and that were read.
        row, group_row = 0, 0
        stop = sum(ranges[-1])
        with closing(_batches(file, location, unit.group, names, decoded)) as batches:
            for batch in batches:
                origin = Origin(str(location), unit.first_row + group_row, batch.num_rows)
                group_row += batch.num_rows
                if self._filter is not None:
                    kept = self._filter.kept(batch)
                    if len(kept) < batch.num_rows:
                        batch, origin = batch.take(pa.array(kept)), _kept(origin, kept)
                for skip, count in ranges:
                    first, last = max(row, skip), min(row + batch.num_rows, skip + count)
                    if first < last:
                        mine = origin.slice(first - row, last - first)
                        data = batch.slice(first - row, last - first)
                        yield Rows(_cast(data, schema, mine), (mine,))
                row += batch.num_rows
                if row >= stop and group_row < num_rows:
                    return
        if row != unit.num_rows:
            raise _replaced(
                location,
                f", or it is damaged ({row} rows of row group {unit.group} were read, "
                f"{unit.num_rows} were expected)",
            )

    @cached_property
    def _groups(self) -> list[list[tuple[int, int]]]:
        """Return ``(first row, number of rows)`` of every row group, as one list per file."""
        found = []
        for metadata in self._metadata:
            rows = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
            found.append(list(zip(accumulate(rows, initial=0), rows, strict=False)))
        return found

    @property
    def _top(self) -> Location:
        """Return the root folder of the table. Stored file paths are relative to this folder."""
        local = self.root.local
        if local is not None and not local.is_dir():
            return Location(local.parent)
        return self.root

    def _with_keys(self, found: list[Location], where: Sequence[Condition]) -> list[Location]:
        if not where:
            return found
        kept = []
        for location in found:
            folders = location.below(self.root).split("/")[:-1]
            keys = dict(part.split("=", 1) for part in folders if "=" in part)
            for condition in where:
                if condition.column not in keys:
                    raise DataError(
                        f"{location}: option 'where' uses {condition.column!r}, which is neither a "
                        "column nor a partition key. Use one of these: "
                        f"{', '.join(map(repr, [*self.schema.names, *keys]))}"
                    )
            values = {
                name: None if key == _NULL_KEY else unquote(key) for name, key in keys.items()
            }
            if all(holds_for_key(each, values[each.column], location) for each in where):
                kept.append(location)
        if not kept:
            raise DataError(
                f"{self.root}: none of {len(found)} files is in a partition that meets option "
                f"'where': {', '.join(map(str, where))}. Fix the values in this option"
            )
        return kept


def read_metadata(path: Path | Location) -> pq.FileMetaData:
    """Return the metadata in the footer of a Parquet file.

    Raises:
        DataError: the file is not Parquet.
        SetupError: the object store cannot be reached, or denies access.
    """
    return _look(Location(path) if isinstance(path, Path) else path)[0]


def read_footers(paths: Sequence[Path | Location]) -> TableStatistics | None:
    """Return the summed duplication statistics in file footers, or None if one file has none.

    Raises:
        DataError: a file is not Parquet, or the features of two files differ.
    """
    found = []
    for path in paths:
        metadata = read_metadata(path).metadata or {}
        if FOOTER_KEY not in metadata:
            return None
        found.append(TableStatistics.from_json(parse_json(metadata[FOOTER_KEY])))
    return TableStatistics.merge(found) if found else None


def _look(location: Location) -> tuple[pq.FileMetaData, Location]:
    """Return a file's footer, and its location with size and modification time."""
    with _errors(location), location.open() as file:
        return _look_at(location, file)


def _look_at(location: Location, source: pa.NativeFile) -> tuple[pq.FileMetaData, Location]:
    seen = location.state_of(source)
    _check_same(location, dict(seen))
    size = source.size()
    tail: bytes = source.read_at(min(size, _TAIL), max(0, size - _TAIL))
    length = int.from_bytes(tail[-_ENDING:-4], "little") + _ENDING
    if len(tail) < length <= size:
        tail = source.read_at(length, size - length)
    footer = tail[-length:]
    metadata = pq.read_metadata(pa.BufferReader(footer))
    seen = (*seen, (_FOOTER, hashlib.sha256(footer).hexdigest()[:16]))
    _check_same(location, dict(seen))
    return metadata, replace(location, seen=seen)


@contextmanager
def _errors(location: Location, what: str = "the file is not valid Parquet") -> Iterator[None]:
    try:
        with location.told():
            yield
    except _UNREADABLE as error:
        csv = "magic bytes" in str(error)  # or another format
        advice = f"For other formats, run recd init {location} my.yaml" if csv else "Write it again"
        raise DataError(f"{location}: {what}: {str(error).rstrip('.')}. {advice}") from error


@contextmanager
def _open(
    location: Location, columns: pa.Schema
) -> Iterator[tuple[pq.ParquetFile, Callable[[], None]]]:
    """Context of an open file and a function that raises if a local file was replaced."""
    # Objects in a store are checked at the end, since requests may return different versions.
    with _errors(location):
        source = location.open()
    with closing(source):
        with _errors(location):
            metadata, location = _look_at(location, source)
            file = pq.ParquetFile(
                source,
                metadata=metadata,
                read_dictionary=[each.name for each in columns if is_list_dict(each)],
                page_checksum_verification=True,
                pre_buffer=True,
            )

        def check() -> None:
            if location.local is not None:
                _check_same(location, dict(location.state_of(source)))

        with closing(file):
            yield file, check
            check()
            if location.local is None:
                with location.told(), location.open() as again:
                    _check_same(location, dict(location.state_of(again)))


def _batches(
    file: pq.ParquetFile, location: Location, group: int, names: Sequence[str], num_rows: int
) -> Generator[pa.RecordBatch, None, None]:
    """Yield columns of a row group in batches of ``num_rows`` rows, in file order."""
    with _errors(location, f"row group {group} cannot be read"):
        for batch in file.iter_batches(
            num_rows, row_groups=[group], columns=list(names), use_threads=False
        ):
            for name, column in zip(names, map(batch.column, names), strict=True):
                # Headers of dictionary pages have no checksum.
                if pt.is_dictionary(column.type) and len(column):
                    code = pc.max(column.indices).as_py()
                    if code is not None and code >= len(column.dictionary):
                        raise DataError(
                            f"{location}: row group {group}: column {name!r} has an index outside "
                            "its dictionary, so the file is damaged. Write the file again"
                        )
            yield batch


def _count(row_filter: RowFilter, location: Location) -> list[int]:
    """Return, for each row group, the number of rows that pass a filter."""
    scan = ds.ParquetFragmentScanOptions(pre_buffer=True, page_checksum_verification=True)
    counts, where = [], row_filter.expression
    with _errors(location, "rows cannot be counted"):
        files, path = location.file_system()
        format_ = ds.ParquetFileFormat(default_fragment_scan_options=scan)
        fragment = format_.make_fragment(path, files)
        for group in fragment.row_groups:
            part = fragment.subset(row_group_ids=[group.id])
            if row_filter.floats:  # statistics ignore NaN
                keeps = part.to_table(columns={"keeps": where})["keeps"]
                counts.append(pc.sum(keeps).as_py() or 0)
            else:
                counts.append(part.count_rows(filter=where))
    return counts


def _replaced(location: Location, what: str) -> DataError:
    return DataError(f"{location} was replaced while it was in use{what}. Start the command again")


def _check_same(location: Location, now: dict[str, str | int]) -> None:
    """Raise DataError if a file has changed since the table was opened."""
    before = dict(location.seen)
    if not before and location.size is not None:
        before = {"size": location.size}
    for name, value in now.items():
        if (was := before.get(name, value)) != value:
            raise _replaced(location, f" (its {name} was {was} and is {value})")


def _kept(origin: Origin, kept: np.ndarray) -> Origin:
    if not len(kept):
        return Origin(origin.path, origin.first_row, 0)
    rows = kept + origin.first_row
    first, last = int(rows[0]), int(rows[-1])
    adjacent = last - first + 1 == len(rows)
    return Origin(origin.path, first, len(rows), None if adjacent else pa.array(rows))


def _cast(data: pa.RecordBatch, schema: pa.Schema, origin: Origin) -> pa.RecordBatch:
    cast = []
    for wanted in schema:  # readers keep the order of the file
        column = data.column(wanted.name)
        try:
            cast.append(column if column.type == wanted.type else column.cast(wanted.type))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{origin.path}: column {wanted.name!r}, rows {origin.first_row} to "
                f"{origin.row(origin.num_rows - 1)}, cannot be cast to {wanted.type}: {error}"
            ) from error
    return pa.record_batch(cast, schema=schema)


def _decoded_schema(metadata: pq.FileMetaData) -> pa.Schema:
    """Return the schema of a file after decoding ``list_dict`` columns to dictionaries."""
    return pa.schema([decoded_field(field) for field in metadata.schema.to_arrow_schema()])


def _kinds(schema: pa.Schema) -> dict[str, str]:
    return {
        field.name: "list_dict"
        if is_list_dict(field)
        else f"list<{field.type.value_type}>"
        if pt.is_list(field.type)
        else str(field.type)
        for field in schema
    }

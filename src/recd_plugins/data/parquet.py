"""A table of Parquet files, local or in a store: its splits, row counts and statistics."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.types as pt

from recd_plugins.data.list_dict import is_list_dict
from recd_plugins.data.reader import Piece, Unit
from recd_plugins.data.row_filter import Condition, RowFilter, holds_for_key
from recd_plugins.data.row_groups import (
    ReadOptions,
    RowGroup,
    decoded_schema,
    footer_digest,
    look_at,
    read_splits,
)
from recd_plugins.data.storage import Location
from recd_plugins.interfaces import Rows
from recd_plugins.interfaces.data_profile import TableStatistics
from recd_plugins.interfaces.rows import Storage
from recd_plugins.runtime.errors import DataError, RecdError
from recd_plugins.runtime.files import parse_json, read_note, real_path, write_note

#: Key of a Parquet footer under which a file carries its ``TableStatistics`` as JSON.
FOOTER_KEY = b"recd.statistics"

# Files that are read at once from a store, where each takes a round trip or two.
_FOOTERS_AT_ONCE, _COUNTED_AT_ONCE = 16, 8
# The folder of a Hive partition whose key is null.
_NULL_KEY = "__HIVE_DEFAULT_PARTITION__"
_COUNTS_VERSION = 2

_Counts = list[list[int]]


class ParquetTable:
    """One table: a Parquet file, or every ``*.parquet`` below a folder in the order of the names.

    Names that start with ``_`` or ``.`` are left out. Folders may be Hive partitions, whose keys
    are no columns, but conditions may name them. Features in layout ``list_dict`` come as
    dictionaries of their values.

    Args:
        path: a local path, or a URL.
        storage: how the store of a URL is reached.
        where: conditions on columns, or on keys of Hive partitions; rows for which all hold are the
            table's. Files whose keys do not fit are not opened.
        options: how columns are read.

    Raises:
        DataError: there is no such file, one is not Parquet, or two differ in their columns; a
            condition names no column, or a value is not of its type.
        SetupError: the store cannot be reached, or refuses.
    """

    def __init__(
        self,
        path: Path | str,
        storage: Storage | None = None,
        *,
        where: Sequence[Condition] = (),
        options: ReadOptions | None = None,
    ) -> None:
        self.path = path
        self.root = Location(path, storage or Storage())
        self._options = options or ReadOptions()
        found = self.root.find(".parquet")
        first = _look(found[0])
        self.schema = decoded_schema(first[0])
        counts = Counter(self.schema.names)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise DataError(f"{found[0]}: has two columns named {twice[0]}; rename one")
        on_columns = [each for each in where if each.column in self.schema.names]
        self.locations = self._with_keys(found, [each for each in where if each not in on_columns])
        self._where = tuple(on_columns)
        self._filter = RowFilter(on_columns, self.schema, found[0]) if on_columns else None
        looked = [first, *_look_at_all(self.locations[1:])]
        if self.locations[0] != found[0]:
            looked[0] = _look(self.locations[0])
        self._metadata, self.locations = map(list, zip(*looked, strict=True))
        for location, metadata in zip(self.locations, self._metadata, strict=True):
            self._check_same(found[0], location, decoded_schema(metadata))

    @property
    def files(self) -> list[Path]:
        """The files of a local table."""
        return [file for location in self.locations if (file := location.local) is not None]

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Row groups and how many rows they have, those without rows left out.

        With conditions on columns they are counted first, unless ``counted`` did it before.
        """
        return self.counted()

    def counted(self, progress: Callable[[int], None] = lambda _groups: None) -> tuple[Unit, ...]:
        """As ``units``; ``progress`` gets how many more row groups were counted."""
        counts = None if self._filter is None else self._counts(self._filter, progress)
        units = [
            Unit(number, group, first_row, num_rows if counts is None else counts[number][group])
            for number, groups in enumerate(self._groups)
            for group, (first_row, num_rows) in enumerate(groups)
        ]
        return tuple(unit for unit in units if unit.num_rows)

    @property
    def num_to_count(self) -> int:
        """Row groups whose rows the filter has to count before training."""
        if self._filter is None or self._cached_counts() is not None:
            return 0
        return sum(map(len, self._groups))

    def identity(self) -> list[list[str | int]]:
        """Path below the table's, footer and rows of each row group of every file; JSON values."""
        rows: list[list[str | int]] = [
            [location.below(self._top), footer_digest(location)] for location in self.locations
        ]
        for unit in self.units:
            rows[unit.file].append(unit.num_rows)
        return rows

    def contents(self) -> dict[str, dict[str, int | str | None]]:
        """Size of every file, and a digest of its footer, by its path below the table's."""
        return {
            location.below(self._top): {"bytes": location.size, "footer": _digest(footer)}
            for location, footer in zip(self.locations, self._metadata, strict=True)
        }

    def splits(self, pieces: Iterable[Piece], schema: pa.Schema) -> Iterator[RowGroup]:
        """Yield pieces as work items, consecutive ones of one row group as one."""
        for unit, adjacent in groupby(pieces, key=lambda piece: piece.unit):
            yield RowGroup(
                file=self.locations[unit.file],
                group=unit.group,
                first_row=unit.first_row,
                group_rows=self._groups[unit.file][unit.group][1],
                num_rows=unit.num_rows,
                ranges=tuple((piece.skip, piece.num_rows) for piece in adjacent),
                columns=schema,
                where=self._where,
                options=self._options,
            )

    def read(self, pieces: Iterable[Piece], schema: pa.Schema) -> Generator[Rows, None, None]:
        """Read ``pieces`` with the columns and types of ``schema``; see ``read_splits``."""
        return read_splits(self.splits(pieces, schema))

    @cached_property
    def _groups(self) -> list[list[tuple[int, int]]]:
        """First row and rows of every row group of every file."""
        found = []
        for metadata in self._metadata:
            rows = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
            found.append(list(zip(accumulate(rows, initial=0), rows, strict=False)))
        return found

    def _counts(self, row_filter: RowFilter, progress: Callable[[int], None]) -> _Counts:
        """Rows that the filter keeps of each row group of each file, noted in the user's cache."""
        if (cached := self._cached_counts()) is not None:
            return cached
        with ThreadPoolExecutor(_COUNTED_AT_ONCE) as threads:
            counts = list(
                threads.map(lambda file: self._count(file, row_filter, progress), self.locations)
            )
        with suppress(RecdError):  # else every reader counts for itself
            write_note(self._cache, {"version": _COUNTS_VERSION, "counts": counts})
        return counts

    def _count(
        self, location: Location, row_filter: RowFilter, progress: Callable[[int], None]
    ) -> list[int]:
        limits = self._options
        scan = ds.ParquetFragmentScanOptions(
            pre_buffer=limits.pre_buffer,
            cache_options=pa.CacheOptions(
                hole_size_limit=limits.hole_size_limit, range_size_limit=limits.range_size_limit
            ),
            page_checksum_verification=True,
        )
        counts, where = [], row_filter.expression
        try:
            with location.told():
                files, path = location.file_system()
                format_ = ds.ParquetFileFormat(default_fragment_scan_options=scan)
                fragment = format_.make_fragment(path, files)
                for group in fragment.row_groups:
                    part = fragment.subset(row_group_ids=[group.id])
                    if row_filter.floats:  # of a NaN the statistics say nothing
                        keeps = part.to_table(columns={"keeps": where})["keeps"]
                        counts.append(pc.sum(keeps).as_py() or 0)
                    else:
                        counts.append(part.count_rows(filter=where))
                    progress(1)
        except (pa.ArrowException, OSError, UnicodeError) as error:
            raise DataError(f"{location}: rows cannot be counted: {error}") from error
        return counts

    def _cached_counts(self) -> _Counts | None:
        found = read_note(self._cache)
        if found is None or found["version"] != _COUNTS_VERSION:
            return None
        counts: _Counts = found["counts"]
        return counts

    @cached_property
    def _cache(self) -> Path:
        """The note of the counts, named after the files as they are and the conditions."""
        files = [
            [each.below(self._top), each.size, each.changed, _digest(footer)]
            for each, footer in zip(self.locations, self._metadata, strict=True)
        ]
        conditions = [[each.column, each.op, each.value] for each in self._where]
        local = self._top.local
        place = str(real_path(local)) if local else [self._top.path, self._top.storage.endpoint]
        text = json.dumps([_COUNTS_VERSION, place, files, conditions], default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(cache, "recd", "row_counts", f"{name}.json")

    @property
    def _top(self) -> Location:
        """The folder that paths of files are relative to."""
        local = self.root.local
        if local is not None and not local.is_dir():
            return Location(local.parent)
        return self.root

    def _with_keys(self, found: list[Location], where: Sequence[Condition]) -> list[Location]:
        """The files whose Hive partitions meet conditions."""
        if not where:
            return found
        kept = []
        for location in found:
            folders = location.below(self.root).split("/")[:-1]
            keys = dict(part.split("=", 1) for part in folders if "=" in part)
            for condition in where:
                if condition.column not in keys:
                    raise DataError(
                        f"{location}: no column {condition.column}, which option where names, nor "
                        f"is it a key of its folders; there are: "
                        f"{', '.join([*self.schema.names, *keys])}"
                    )
            if all(holds_for_key(each, _key(keys[each.column]), location) for each in where):
                kept.append(location)
        if not kept:
            raise DataError(
                f"{self.root}: none of {len(found)} files is in a folder for which option where "
                f"holds: {', '.join(map(str, where))}"
            )
        return kept

    def _check_same(self, first_file: Location, file: Location, schema: pa.Schema) -> None:
        first, other = ({each.name: _kind(each) for each in of} for of in (self.schema, schema))
        for name in {**first, **other}:
            one, two = first.get(name, "missing"), other.get(name, "missing")
            if one != two:
                raise DataError(
                    f"files of one table differ: column {name} is {one} in {first_file} "
                    f"and {two} in {file}"
                )


def read_metadata(path: Path | Location) -> pq.FileMetaData:
    """Return the footer of a file.

    Raises:
        DataError: it is no Parquet file, or a column is marked as another layout than it has.
        SetupError: its store cannot be reached, or refuses.
    """
    return _look(Location(path) if isinstance(path, Path) else path)[0]


def read_footers(paths: Sequence[Path | Location]) -> TableStatistics | None:
    """Return the statistics that the files of a table carry, None if one of them carries none.

    Raises:
        DataError: a file is no Parquet file, its statistics cannot be read, or the files' features
            differ.
    """
    found = []
    for path in paths:
        metadata = read_metadata(path).metadata or {}
        if FOOTER_KEY not in metadata:
            return None
        found.append(TableStatistics.from_json(parse_json(metadata[FOOTER_KEY])))
    return TableStatistics.merge(found) if found else None


def _look_at_all(locations: Sequence[Location]) -> list[tuple[pq.FileMetaData, Location]]:
    if not locations or locations[0].local is not None:
        return list(map(_look, locations))
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
        return list(threads.map(_look, locations))


def _look(location: Location) -> tuple[pq.FileMetaData, Location]:
    """As ``read_metadata``, and the location with what identifies the file's content."""
    try:
        with location.told(), location.open() as file:
            return look_at(location, file)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        other = "magic bytes" in str(error)
        advice = f" recd init {location} my.yaml reads other formats." if other else ""
        raise DataError(f"{location}: no readable Parquet file: {error}{advice}") from error


def _digest(footer: pq.FileMetaData) -> str:
    """Digest of row groups, places and statistics: not all file systems say when files change."""
    sink = io.BytesIO()
    footer.write_metadata_file(sink)
    return hashlib.sha256(sink.getbuffer()).hexdigest()


def _kind(field: pa.Field) -> str:
    """The type in words. Whether lists can hold nulls makes no difference."""
    if is_list_dict(field):
        return "list_dict"
    return f"list<{field.type.value_type}>" if pt.is_list(field.type) else str(field.type)


def _key(text: str) -> str | None:
    return None if text == _NULL_KEY else unquote(text)

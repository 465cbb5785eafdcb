"""How many rows of each row group a filter keeps: known before training, so that plans are exact.

Statistics decide on row groups of which all rows are kept, or none. Of the others the filter's
columns are read, once on a machine: what is found goes into a file of the user's cache, under a
name that stands for the files as they are and for the conditions.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from recd_plugins.data.buffered_file import ReadOptions
from recd_plugins.data.file_identity import replaced
from recd_plugins.data.row_filter import Condition, RowFilter
from recd_plugins.data.row_groups import OpenFile
from recd_plugins.data.storage import Location
from recd_plugins.errors import RecdError, SetupError
from recd_plugins.files import read_note, real_path, write_note

#: Rows by row group, by file.
Counts = list[list[int]]

_VERSION = 2
_AT_ONCE = 8
_DECODE_ROWS = 65_536


class RowCounts:
    """Counts of one table under one filter.

    Args:
        locations, metadata: its files and their footers.
        where: conditions on its columns.
        row_filter: these, typed.
        options: how columns are read.
        root: the table's place.
    """

    def __init__(
        self,
        locations: Sequence[Location],
        metadata: Sequence[pq.FileMetaData],
        where: Sequence[Condition],
        row_filter: RowFilter,
        options: ReadOptions,
        root: Location,
    ) -> None:
        self._locations = locations
        self._filter = row_filter
        self._options = options
        self._schema = metadata[0].schema.to_arrow_schema()
        self._rows = [
            [each.row_group(number).num_rows for number in range(each.num_row_groups)]
            for each in metadata
        ]
        self._verdicts = [row_filter.verdicts(each) for each in metadata]
        self._cache = _cache_folder() / f"{self._name(metadata, where, root)}.json"

    @property
    def num_unknown(self) -> int:
        """Row groups of which statistics do not say how many rows are kept, nor does the cache."""
        return 0 if self._cached() is not None else self._num_undecided

    def counts(self, progress: Callable[[int], None]) -> Counts:
        """Rows kept of each row group; ``progress`` gets how many more of them were read.

        Raises:
            DataError: a file is damaged, or was replaced meanwhile.
            SetupError: the store cannot be reached or refuses, or the cache cannot be written.
        """
        if not self._num_undecided:
            return [self._known(number) for number in range(len(self._locations))]
        if (cached := self._cached()) is not None:
            return cached
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            numbers = range(len(self._locations))
            counts = list(threads.map(lambda number: self._count(number, progress), numbers))
        try:
            write_note(self._cache, {"version": _VERSION, "counts": counts})
        except RecdError as error:
            raise SetupError(
                f"{error}; rows that option where keeps are counted once and noted there, so set "
                "XDG_CACHE_HOME to a folder that can be written"
            ) from error
        return counts

    @property
    def _num_undecided(self) -> int:
        return sum(verdict is None for of_file in self._verdicts for verdict in of_file)

    def _known(self, number: int) -> list[int]:
        pairs = zip(self._rows[number], self._verdicts[number], strict=True)
        return [rows if verdict else 0 for rows, verdict in pairs]

    def _count(self, number: int, progress: Callable[[int], None]) -> list[int]:
        """One file, which is opened where something is left to be counted."""
        counts = self._known(number)
        unknown = [group for group, each in enumerate(self._verdicts[number]) if each is None]
        if not unknown:
            return counts
        location, names = self._locations[number], self._filter.columns
        with OpenFile(location, self._schema, self._options) as file:
            for group in unknown:
                if file.rows_of(group) != self._rows[number][group]:
                    raise replaced(location)
                with closing(file.batches(group, names, _DECODE_ROWS)) as batches:
                    for batch in batches:
                        counts[group] += pc.sum(self._filter.mask(batch)).as_py() or 0
                progress(1)
        return counts

    def _cached(self) -> Counts | None:
        # Not there, or not what is written here: it is counted anew and replaced.
        found = read_note(self._cache)
        if found is None or found["version"] != _VERSION:
            return None
        counts: Counts = found["counts"]
        return counts

    def _name(
        self, metadata: Sequence[pq.FileMetaData], where: Sequence[Condition], root: Location
    ) -> str:
        files = [
            [each.below(root), each.size, each.changed, digest_of_footer(footer)]
            for each, footer in zip(self._locations, metadata, strict=True)
        ]
        conditions = [[each.column, each.op, each.value] for each in where]
        place = str(real_path(root.local)) if root.local else [root.path, root.storage.endpoint]
        text = json.dumps([_VERSION, place, files, conditions], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def digest_of_footer(footer: pq.FileMetaData) -> str:
    """Digest of row groups, places and statistics: not all file systems say when files change."""
    sink = io.BytesIO()
    footer.write_metadata_file(sink)
    return hashlib.sha256(sink.getbuffer()).hexdigest()


def _cache_folder() -> Path:
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "recd" / "row_counts"
    try:
        return Path.home() / ".cache" / "recd" / "row_counts"
    except RuntimeError as error:
        raise SetupError(
            f"{error}: rows that option where keeps are counted once and noted there, so set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error

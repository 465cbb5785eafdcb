"""The dataset plugin ``streaming.files``, which trains on Parquet files that appear in a folder."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, PositiveFloat

from recd_plugin_streaming.columns import Columns, StreamOptions
from recd_plugin_streaming.options import Stream, say
from recd_plugin_streaming.ranges import Left, Positions, Ranges, cut, joined, size
from recd_plugin_streaming.source import Chunk, Source
from recd_plugins.api import DataError, Storage, object_stores, parquet, readers

# Seconds between two looks of a waiting reader whether it is to end.
_TICK = 0.2


class Files(Stream):
    """Reads each row of the Parquet files in a folder once, also of files that are added later."""

    name = "streaming.files"
    free_options = frozenset({"path", "storage", "poll_seconds", "end"})

    class Options(StreamOptions):
        """Options of the folder, its columns and windows."""

        path: Path | object_stores.Url = Field(
            description="Folder or URL of a folder with files *.parquet at any depth."
        )
        storage: Storage = Field(default=Storage(), description="Options for reading from a URL.")
        order: Literal["name", "modified"] = Field(
            default="name", description="Order of new files: by name, or by modification time."
        )
        poll_seconds: PositiveFloat = Field(
            default=5.0, description="Seconds between two listings of the folder."
        )
        end: Literal["never", "latest"] = Field(
            default="never",
            description="never: train until a signal. latest: train the files that exist at the "
            "start.",
        )

    options: Options

    def prepare(self) -> None:
        self._source(0, 1).files()

    def _source(self, rank: int, world_size: int) -> FilesSource:
        return FilesSource(self.options, self._columns, rank, world_size)

    def _existing(self) -> Iterator[FilesSource]:
        options = self.options.model_copy(update={"end": "latest"})
        yield FilesSource(options, self._columns, 0, 1)


class FilesSource(Source):
    """Reads this rank's share of the rows of each file: ranks divide a file's rows evenly.

    Names of files are paths relative to the folder.
    """

    def __init__(
        self, options: Files.Options, columns: Columns, rank: int, world_size: int
    ) -> None:
        super().__init__(rank, world_size)
        self._options, self._columns = options, columns
        self._root = object_stores.Location(options.path, options.storage)
        # Rows left of each file when this source began to read it.
        self._left: dict[str, Left] = {}
        self._incomplete: set[str] = set()
        self.what = str(self._root)

    def files(self) -> dict[str, object_stores.Location]:
        """Return the files by name, in order."""
        found = self._root.find(".parquet", may_be_empty=True)
        if self._options.order == "modified":
            found.sort(key=lambda file: (file.changed or 0, str(file)))
        return {file.below(self._root): file for file in found}

    def start(self, positions: Positions | None) -> Mapping[str, Left]:
        self._left = dict(positions or {})
        return {name: left for name, left in self._left.items() if not left.is_done}

    def chunks(self) -> Iterator[Chunk | None]:
        started = [name for name, left in self._left.items() if not left.is_done]
        # Files with rows of a partly trained window come first.
        for name in sorted(started, key=lambda name: not self._left[name].window):
            yield from self._read(name, self._table(name))
        while True:
            for name, file in self.files().items():
                if name in self._left:
                    continue
                try:
                    table = parquet.ParquetTable(file.path, self._options.storage)
                except DataError as error:  # it may still be written
                    if name not in self._incomplete:
                        say(f"{error}. The file is trained when it is complete")
                    self._incomplete.add(name)
                    continue
                share = _share(_num_rows(table), self.rank, self.world_size)
                self._left[name] = Left((), (share,))
                yield from self._read(name, table)
            if self._options.end == "latest":
                return
            until = time.monotonic() + self._options.poll_seconds
            while time.monotonic() < until:
                yield None
                time.sleep(_TICK)

    def _table(self, name: str) -> parquet.ParquetTable:
        if (file := self.files().get(name)) is None:
            raise DataError(
                f"{self.what}: {name}: the file was deleted before all its rows were trained. "
                "Restore the file, or start a new run"
            )
        return parquet.ParquetTable(file.path, self._options.storage)

    def _read(self, name: str, table: parquet.ParquetTable) -> Iterator[Chunk]:
        left = self._left[name]
        for start, stop in (*left.window, *left.after):
            until = start
            pieces = []
            for unit in table.units:
                first = max(start, unit.first_row)
                last = min(stop or 0, unit.first_row + unit.num_rows)
                if first < last:
                    pieces.append(readers.Piece(unit, first - unit.first_row, last - first))
            for rows in self._columns.read(table, pieces):
                first, until = until, until + len(rows)
                if mistakes := self._columns.mistakes(rows.data):
                    row = min(mistakes)
                    raise DataError(
                        f"{self.place_of(name, first + row)}: {mistakes[row]}. Fix the row"
                    )
                after = cut(left.after, until)
                yield Chunk(name, rows.data, np.arange(first, until), until, after)
        if not size((*left.window, *left.after)):  # a file with fewer rows than ranks
            empty = pa.RecordBatch.from_pylist([], schema=self._columns.arrow)
            yield Chunk(name, empty, np.empty(0, np.int64), 0, ())

    def lag(self, positions: Positions, done: Container[str]) -> int:
        known = [each for each in tuple(self._left.items()) if each[0] not in done]
        left = [positions.get(name, at_start) for name, at_start in known]
        return sum(size(each.window) + size(each.after) for each in left)

    def position_of(self, states: Sequence[Positions]) -> Positions:
        if len(states) == self.world_size:
            return states[self.rank]
        found = {}
        for name in dict.fromkeys(name for state in states for name in state):
            ranges: list[tuple[int, int | None]] = []
            for old_rank, state in enumerate(states):
                if name in state:
                    ranges += (*state[name].window, *state[name].after)
                else:
                    num_rows = _num_rows(self._table(name))
                    ranges.append(_share(num_rows, old_rank, len(states)))
            left = joined(tuple(ranges))
            start, stop = _share(size(left), self.rank, self.world_size)
            found[name] = Left((), _rows(left, start, stop))
        return found

    def place_of(self, partition: str, offset: int) -> str:
        return f"{self.what}: {partition}: row {offset} (from 0)"


def _num_rows(table: parquet.ParquetTable) -> int:
    return sum(unit.num_rows for unit in table.units)


def _share(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    return num_rows * rank // world_size, num_rows * (rank + 1) // world_size


def _rows(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return rows ``first`` to ``last``, counted over all finite ranges."""
    found = []
    for start, stop in ranges:
        length = (stop or 0) - start
        found.append((start + max(0, first), start + min(length, last)))
        first, last = first - length, last - length
    return joined(tuple(each for each in found if each[0] < each[1]))

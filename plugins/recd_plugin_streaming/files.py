"""The dataset plugin ``streaming.files``, which trains on Parquet files that appear in a folder."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, PositiveFloat

from recd_plugin_streaming.columns import Columns
from recd_plugin_streaming.options import Stream, StreamOptions, say
from recd_plugin_streaming.ranges import Left, Positions, Ranges, cut, joined, size
from recd_plugin_streaming.source import Chunk, Source
from recd_plugins.api import DataError, Rows, Storage, object_stores, parquet, readers

# Seconds between two looks of a waiting reader whether it is to end.
_TICK = 0.2


class FilesOptions(StreamOptions):
    """Options of ``streaming.files``."""

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
        description="never: train until a signal. latest: train the files that exist at the start.",
    )


class Files(Stream):
    """Trains each row of the Parquet files in a growing folder once."""

    name = "streaming.files"
    free_options = frozenset({"path", "storage", "poll_seconds", "end"})

    class Options(FilesOptions):
        """Options of the folder, its columns and windows."""

    options: Options

    def prepare(self) -> None:
        self._folder().list()

    def _existing(self) -> Iterator[Rows]:
        folder = self._folder()
        for file in folder.new(()):
            num_rows = folder.num_rows(file)
            for _, rows in folder.read(file, ((0, num_rows),)):
                yield rows

    def _folder(self) -> Folder:
        return Folder(self.options, self._columns)

    def _source(self, rank: int, world_size: int) -> FilesSource:
        return FilesSource(self.options, self._folder(), rank, world_size)


class Folder:
    """Complete Parquet files below a folder. Their names are paths relative to the folder."""

    def __init__(self, options: FilesOptions, columns: Columns) -> None:
        self._options, self._columns = options, columns
        self.root = object_stores.Location(options.path, options.storage)
        self._tables: dict[str, parquet.ParquetTable] = {}
        self._incomplete: set[str] = set()
        self.schema = columns.arrow

    def list(self) -> dict[str, object_stores.Location]:
        """Return the files by name, in order."""
        found = self.root.find(".parquet", may_be_empty=True)
        if self._options.order == "modified":
            found.sort(key=lambda file: (file.changed or 0, str(file)))
        return {file.below(self.root): file for file in found}

    def new(self, known: Container[str]) -> Iterator[str]:
        """Yield the complete files that are not ``known``, in order."""
        for name, file in self.list().items():
            if name in known:
                continue
            try:
                self._tables[name] = parquet.ParquetTable(file.path, self._options.storage)
            except DataError as error:  # it may still be written
                if name not in self._incomplete:
                    say(f"{error}. The file is trained when it is complete")
                self._incomplete.add(name)
                continue
            yield name

    def num_rows(self, name: str) -> int:
        return sum(unit.num_rows for unit in self._table(name).units)

    def read(self, name: str, ranges: Ranges) -> Iterator[tuple[int, Rows]]:
        """Yield (number of the first row, rows) of some ranges of a file."""
        table = self._table(name)
        missing = [each for each in self._columns.arrow.names if each not in table.schema.names]
        if missing:
            raise DataError(
                f"{self.place(name)}: there is no column {missing[0]!r}. Write the column, or "
                "correct the option 'columns'"
            )
        types = pa.schema([table.schema.field(each) for each in self._columns.arrow.names])
        for start, stop in ranges:
            pieces = []
            for unit in table.units:
                first = max(start, unit.first_row)
                last = min(stop or 0, unit.first_row + unit.num_rows)
                if first < last:
                    pieces.append(readers.Piece(unit, first - unit.first_row, last - first))
            first = start
            for rows in table.read(pieces, types):
                yield first, self._checked(name, first, rows)
                first += len(rows)

    def place(self, name: str) -> str:
        return str(self.root) if str(self.root).endswith(name) else f"{self.root}: {name}"

    def close(self, name: str) -> None:
        self._tables.pop(name, None)

    def _table(self, name: str) -> parquet.ParquetTable:
        if name not in self._tables:
            file = self.list().get(name)
            if file is None:
                raise DataError(
                    f"{self.place(name)}: the file was deleted before all its rows were trained. "
                    "Restore the file, or start a new run"
                )
            self._tables[name] = parquet.ParquetTable(file.path, self._options.storage)
        return self._tables[name]

    def _checked(self, name: str, first: int, rows: Rows) -> Rows:
        try:
            data = self._columns.cast(rows.data)
        except ValueError as error:
            raise DataError(
                f"{self.place(name)}: {error}. Write the file with the types of the option "
                "'columns'"
            ) from error
        for row, reason in sorted(self._columns.mistakes(data).items())[:1]:
            raise DataError(
                f"{self.place(name)}: row {first + row} (from 0): {reason}. Fix the row"
            )
        return Rows(data, rows.origins)


class FilesSource(Source):
    """Reads this rank's share of the rows of each file: ranks divide a file's rows evenly."""

    def __init__(self, options: FilesOptions, folder: Folder, rank: int, world_size: int) -> None:
        self._options, self._folder = options, folder
        self._rank, self._world_size = rank, world_size
        # Rows left at the start, of all files and of files that are not yet trained.
        self._left: dict[str, Left] = {}
        self._open: dict[str, Left] = {}
        self.what = str(folder.root)

    def start(self, positions: Positions | None) -> Mapping[str, Left]:
        self._left = dict(positions or {})
        self._open = {name: left for name, left in self._left.items() if not left.is_done}
        return dict(self._open)

    def chunks(self) -> Iterator[Chunk | None]:
        # Files with rows of a partly trained window come first.
        started = sorted(self._open, key=lambda name: not self._left[name].window)
        for name in started:
            yield from self._read(name)
        while True:
            for name in self._folder.new(self._left):
                share = _share(self._folder.num_rows(name), self._rank, self._world_size)
                self._left[name] = self._open[name] = Left((), (share,))
                yield from self._read(name)
            if self._options.end == "latest":
                return
            until = time.monotonic() + self._options.poll_seconds
            while time.monotonic() < until:
                yield None
                time.sleep(_TICK)

    def _read(self, name: str) -> Iterator[Chunk]:
        left = self._left[name]
        ranges = (*left.window, *left.after)
        read = False
        for first, rows in self._folder.read(name, ranges):
            until = first + len(rows)
            after = cut(left.after, until)
            yield Chunk(name, rows.data, np.arange(first, until), until, after)
            read = True
        if not read:  # a file with fewer rows than ranks
            empty = pa.RecordBatch.from_pylist([], schema=self._folder.schema)
            yield Chunk(name, empty, np.empty(0, np.int64), 0, ())
        self._folder.close(name)

    def lag(self, positions: Positions, done: Container[str]) -> int:
        for name in [name for name in tuple(self._open) if name in done]:
            del self._open[name]
        left = [positions.get(name, each) for name, each in tuple(self._open.items())]
        return sum(size(each.window) + size(each.after) for each in left)

    def close(self) -> None:
        """Do nothing: files are closed after each read."""

    def positions_of(
        self, states: Sequence[Positions], rank: int, world_size: int
    ) -> Mapping[str, Left]:
        names = dict.fromkeys(name for state in states for name in state)
        found = {}
        for name in names:
            ranges: list[tuple[int, int | None]] = []
            for old_rank, state in enumerate(states):
                if name in state:
                    ranges += (*state[name].window, *state[name].after)
                else:
                    ranges.append(_share(self._folder.num_rows(name), old_rank, len(states)))
            left = joined(tuple(ranges))
            start, stop = _share(size(left), rank, world_size)
            found[name] = Left((), _rows(left, start, stop))
        return found

    def place_of(self, partition: str, offset: int) -> str:
        return f"{self._folder.place(partition)}: row {offset} (from 0)"


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

"""The days of a dataset, opened, and which of their rows are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from recd_plugin_dlrm.criteo.dataset import CriteoOptions
from recd_plugin_dlrm.criteo.days import Day, DayFiles, Stretch, find_days
from recd_plugin_dlrm.criteo.dictionary import CountedRows
from recd_plugin_dlrm.criteo.stored_days import NpyDay, ParquetDay
from recd_plugin_dlrm.criteo.tsv import BadLines, TsvDay, load_index, make_index
from recd_plugins.api import Split

#: Folder beside the data for what is known of it, where option ``cache`` names no other.
CACHE = ".recd-criteo"

#: Begins some work: takes its name and, where it is known, how many rows it has; what it returns
#: takes the rows done since the last call.
Start = Callable[[str, int | None], Callable[[int], None]]

#: Rows of a day: its number among the days, and what of it.
Share = tuple[int, list[Stretch]]


class CriteoTables:
    """The days.

    Args:
        options: of the dataset.
        cache: folder of what is known of TSV files.
        start: tells of work that takes a while.

    Attributes:
        days: in order.
        num_bad_lines: of all TSV files.
        bad_lines: what is wrong with the first of them.

    Raises:
        DataError: there is no such data, or it is damaged.
    """

    def __init__(self, options: CriteoOptions, cache: Path, start: Start) -> None:
        self._options = options
        bad_lines = BadLines.of(options.bad_lines, options.max_bad_lines)
        self.days = [
            _open(files, cache, options.npy_sparse, bad_lines, start)
            for files in find_days(options.path)
        ]
        self.num_bad_lines, self.bad_lines = bad_lines.count, bad_lines.shown

    def split(self, split: Split) -> list[Share]:
        """The rows of a split, in order.

        The first half of the last day, the longer one where they differ, is for validation, the
        second for testing, as in torchrec.datasets.criteo. Of one file alone, the days are equal
        parts, of which the first have a row more where they do not come out even, as in DLRM.
        """
        *train, last = self._by_day()
        if self._options.evaluate == "nothing":
            return [self._share(*each) for each in [*train, last]]
        if split == "train":
            return [self._share(*each) for each in train]
        number, first, stop = last
        middle = stop - (stop - first) // 2
        ranges = {
            "test": (middle, stop),
            "validation": (first, middle),
            "last_day": (first, stop),
        }
        return [self._share(number, *ranges[self._options.evaluate])]

    def sections(self) -> list[CountedRows]:
        """The rows that are trained on, day by day."""
        return [
            CountedRows(self.days[number], stretches)
            for number, stretches in self.split("train")
            if stretches
        ]

    def _by_day(self) -> Iterator[tuple[int, int, int]]:
        """For each day its number among the files, its first row there and that after its last."""
        if len(self.days) > 1:
            for number, day in enumerate(self.days):
                yield number, 0, day.num_rows
            return
        size, more = divmod(self.days[0].num_rows, self._options.parts)
        first = 0
        for part in range(self._options.parts):
            stop = first + size + (part < more)
            yield 0, first, stop
            first = stop

    def _share(self, number: int, first: int, stop: int) -> Share:
        return number, self.days[number].stretches(first, stop) if first < stop else []


def _open(files: DayFiles, cache: Path, npy_sparse: str, bad_lines: BadLines, start: Start) -> Day:
    if files.format == "Parquet":
        return ParquetDay(files.name, files.path)
    if files.format == "npy":
        return NpyDay(files.name, files.path, npy_sparse)
    index = load_index(files.path, cache)
    if index is None:
        index = make_index(files.path, cache, bad_lines, start(f"reading {files.name}", None))
    else:
        bad_lines.add_known(index.num_bad_lines, index.bad_lines)
    return TsvDay(files.name, files.path, index)

"""The note beside an import: its inputs, and what became of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_tables.plan import CANDIDATE, ROW
from recd_plugins.api import read_note, write_note

NOTE = "import.json"


@dataclass(frozen=True)
class ImportNote:
    """What an import is.

    Attributes:
        rows: of the table.
        train, test: rows of the splits.
        positives, train_positives: rows with label 1, of both splits and of training.
        scoring: whether it is a table to score, of which every row stays.
        without_candidates: rows of the table that had no candidate to make a row of.
        dropped: rows that were left out for a value, by column.
        filled: values that were missing or no number and became others, by column.
        widths: how many numbers the lists of a feature hold.
        files: of the table in their order, and how many rows each has.
        times: first and last time of the rows of each split, in microseconds since 1970; empty
            where no column is the time.
    """

    rows: int
    train: int
    test: int
    positives: int
    train_positives: int
    scoring: bool
    without_candidates: int
    dropped: Mapping[str, int]
    filled: Mapping[str, int]
    widths: Mapping[str, int]
    files: Sequence[tuple[str, int]]
    times: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into the folder of the import."""
        write_note(folder / NOTE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> ImportNote | None:
        """The note of an import; None where it is none that was finished."""
        found = read_note(folder / NOTE)
        return cls(**found) if found is not None else None

    def time_leak(self, test_times: tuple[int, int] | None) -> list[str]:
        """Return a warning, as a list of lines, if training rows are later than test rows."""
        train_times = self.times.get("train")
        if train_times is None or test_times is None or train_times[1] <= test_times[0]:
            return []
        return [
            "  training rows are later than test rows, so the figures may be too good; split: {by: "
            "time} tests on the last rows"
        ]

    def in_words(self, name: str) -> list[str]:
        """What a user should know of it, in lines."""
        test = f" and {self.test:,} for the test" if self.test else ""
        what_for = "to score" if self.scoring else "for training"
        as_many = self.train + self.test == self.rows
        became = ":" if as_many else ", which became"
        lines = [f"{name}: {self.rows:,} rows{became} {self.train:,} {what_for}{test}"]
        if self.scoring and as_many:
            lines = [f"{name}: {self.rows:,} rows to score"]
        what = "scored that training leaves out" if self.scoring else "left out"
        lines += [f"  {count:,} rows {what}: column {c}" for c, count in self.dropped.items()]
        if self.without_candidates:
            lines.append(f"  {self.without_candidates:,} rows have no candidate, and left none")
        lines += [
            f"  {count:,} values of column {c} were missing or not finite"
            for c, count in self.filled.items()
        ]
        return lines + self.time_leak(self.times.get("test"))


@dataclass(frozen=True)
class SourceRows:
    """Names a row of an import's file by the file and row that it came from.

    Attributes:
        files: of the table in their order, and how many rows each has.
        exploded: whether a row of the table has several of the import, its candidates.
    """

    files: Sequence[tuple[str, int]]
    exploded: bool

    def __call__(self, path: str, row: int) -> str:
        """In words, with the row from 0, and the candidate where there are some."""
        found = _stored(path, row)
        in_file = found[ROW]
        candidate = f", candidate {found[CANDIDATE]}" if self.exploded else ""
        for file, num_rows in self.files:
            if in_file < num_rows:
                return f"{file}: row {in_file} (from 0){candidate}"
            in_file -= num_rows
        raise IndexError(row)


def _stored(path: str, row: int) -> dict[str, int]:
    """What an import keeps of where one of its rows came from."""
    with pq.ParquetFile(pa.OSFile(path)) as file:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if row < num_rows:
                found = file.read_row_group(group, [ROW, CANDIDATE]).slice(row, 1)
                return dict(found.to_pylist()[0])
            row -= num_rows
    raise IndexError(row)

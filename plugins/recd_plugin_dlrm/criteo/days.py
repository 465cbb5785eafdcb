"""Rows of Criteo's logs as they are stored: a label, 13 numbers, 26 ids."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import DataError, Origin

LABEL = "label"
#: Names as in torchrec.datasets.criteo.
DENSE = tuple(f"int_{number}" for number in range(13))
SPARSE = tuple(f"cat_{number}" for number in range(26))
COLUMNS = (LABEL, *DENSE, *SPARSE)


@dataclass(frozen=True)
class RawRows:
    """Some rows, column by column.

    Attributes:
        labels: 0 or 1, int8 ``[num_rows]``.
        dense: 13 arrays ``[num_rows]``: int64 as logged, 0 where the log has nothing, or floats
            where files hold numbers that were transformed before.
        sparse: 26 arrays of ids, int64 ``[num_rows]``, 0 where the log has nothing.
    """

    labels: NDArray[np.int8]
    dense: Sequence[NDArray[Any]]
    sparse: Sequence[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.labels)

    def slice(self, start: int, stop: int) -> RawRows:
        """Rows ``start`` to ``stop``, without a copy."""
        return RawRows(
            self.labels[start:stop],
            [column[start:stop] for column in self.dense],
            [column[start:stop] for column in self.sparse],
        )


Format = Literal["TSV", "TSV, gzip", "TSV, zstd", "Parquet", "npy"]

_TSV: dict[str, Format] = {"": "TSV", ".gz": "TSV, gzip", ".zst": "TSV, zstd"}
_NAME = re.compile(r"(?P<stem>day_(?P<day>\d+)|train)(?P<text>\.tsv|\.txt|)(?P<suffix>|\.gz|\.zst)")
_PARQUET_NAME = re.compile(r"(?P<stem>day_(?P<day>\d+)|train)(\.parquet)?")
_NPY_NAME = re.compile(r"(?P<stem>day_(?P<day>\d+)|train)_(dense|sparse\w*|labels)\.npy")


@dataclass(frozen=True)
class DayFiles:
    """Where a day is.

    Attributes:
        name: ``day_0`` or ``train``.
        number: of the day; None of a file that holds several days.
        format: how it is stored.
        path: the file or folder; of npy the folder with its three files.
    """

    name: str
    number: int | None
    format: Format
    path: Path


def find_days(path: Path) -> list[DayFiles]:
    """The days at ``path``, in order; one that holds several days stands alone.

    Raises:
        DataError: nothing is there, a day is missing, stands twice, or is in another format.
    """
    if path.is_file():
        return [_one_file(path)]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    found = _in_folder(path)
    days = sorted((day for day in found if day.number is not None), key=lambda day: day.number or 0)
    whole = [day for day in found if day.number is None]
    if days and whole:
        raise DataError(
            f"{path} has {_names(days[:1])} and {_names(whole[:1])}; name one of them in path"
        )
    if not found and any(path.glob("*.parquet")):
        found = whole = [DayFiles(path.name, None, "Parquet", path)]
    if not found:
        raise DataError(
            f"{path}: no file of Criteo's in this folder: day_0, day_1... or train, as .txt, .tsv, "
            "with .gz or .zst, as .parquet or a folder of it, or as _dense.npy, _sparse.npy and "
            "_labels.npy"
        )
    for before, day in pairwise(days):
        assert before.number is not None
        if day.number == before.number:
            raise DataError(f"{path} has {_names([before, day])}: one day, twice; remove one")
        if day.number != before.number + 1:
            raise DataError(
                f"{path}: day_{before.number + 1} is missing between {before.name} and {day.name}"
            )
        if day.format != before.format:
            raise DataError(
                f"{path} mixes formats: {_names([before, day])}; keep days of one format there"
            )
    if len(whole) > 1:
        raise DataError(f"{path} has {_names(whole)}; name one of them in path")
    return days or whole


def _one_file(path: Path) -> DayFiles:
    if path.suffix == ".npy":
        raise DataError(f"{path}: npy files come in threes; name their folder in path")
    if path.suffix == ".parquet":
        return DayFiles(_known(path.stem), None, "Parquet", path)
    kind = _TSV.get(path.suffix, "TSV")
    stem = path.name.removesuffix(path.suffix) if kind != "TSV" else path.name
    return DayFiles(_known(stem.removesuffix(".tsv").removesuffix(".txt")), None, kind, path)


def _known(stem: str) -> str:
    """A name that is found in a folder, too: converted files are named by it."""
    return stem if _PARQUET_NAME.fullmatch(stem) else "train"


def _in_folder(folder: Path) -> list[DayFiles]:
    days = []
    npy: dict[str, DayFiles] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from error
    for path in paths:
        if path.is_dir() or path.suffix == ".parquet":
            if (match := _PARQUET_NAME.fullmatch(path.name)) and _is_parquet(path):
                days.append(_day(match, "Parquet", path))
        elif match := _NPY_NAME.fullmatch(path.name):
            npy[match["stem"]] = _day(match, "npy", folder)
        elif match := _NAME.fullmatch(path.name):
            days.append(_day(match, _TSV[match["suffix"]], path))
    return [*days, *npy.values()]


def _is_parquet(path: Path) -> bool:
    return path.is_file() or any(path.glob("*.parquet"))


def _day(match: re.Match[str], kind: Format, path: Path) -> DayFiles:
    number = None if match["day"] is None else int(match["day"])
    return DayFiles(match["stem"], number, kind, path)


def _names(days: Sequence[DayFiles]) -> str:
    return " and ".join(
        f"{day.name}_*.npy" if day.format == "npy" else f"{day.path.name} ({day.format})"
        for day in days
    )


#: Rows that are read at once where files have no units of their own.
UNIT_ROWS = 16_384


@dataclass(frozen=True)
class Stretch:
    """``num_rows`` adjacent rows of a day, within one of its units."""

    first_row: int
    num_rows: int


class Day(ABC):
    """Rows of one file or set of files, in order.

    Attributes:
        name: for messages and for the state of a reader: ``day_0``, ``train``.
        starts: the first row of each unit, int64 ``[num_units]``; reading may begin at one.
        num_rows: of all units, at least 1.
        can_jump: whether reading may begin anywhere at no cost, which shuffling takes.
    """

    name: str
    starts: NDArray[np.int64]
    num_rows: int
    can_jump: bool = True

    @abstractmethod
    def identity(self) -> list[Any]:
        """What tells these rows from others, JSON values; equal wherever the files lie."""

    def contents(self) -> dict[str, Any]:
        """What tells this day from another of as many rows; as quick to know as ``identity``."""
        return {"rows": self.identity()}

    def provenance(self) -> list[Any]:
        """``identity``, and what else a dictionary of these ids is known by; JSON values."""
        return self.identity()

    @abstractmethod
    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        """The rows of stretches, each in one part or several, and where they came from.

        Raises:
            DataError: files are damaged, or were replaced after this object was made.
        """

    def stretches(self, first_row: int, stop_row: int) -> list[Stretch]:
        """The rows from ``first_row`` to ``stop_row``, cut where units begin."""
        inside = self.starts[(self.starts > first_row) & (self.starts < stop_row)].tolist()
        edges = [first_row, *inside, stop_row]
        return [Stretch(start, stop - start) for start, stop in pairwise(edges) if start < stop]


def even_starts(num_rows: int) -> NDArray[np.int64]:
    """Units of ``UNIT_ROWS`` rows."""
    return np.arange(0, num_rows, UNIT_ROWS, dtype=np.int64)

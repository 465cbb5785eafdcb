"""Files of Criteo's logs by day: finds the files, and reads Parquet and npy."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugins.api import DataError, Origin, parquet, readers

LABEL = "label"
#: Names as in torchrec.datasets.criteo.
DENSE = tuple(f"int_{number}" for number in range(13))
SPARSE = tuple(f"cat_{number}" for number in range(26))
COLUMNS = (LABEL, *DENSE, *SPARSE)
#: Rows per read for files without units of their own.
UNIT_ROWS = 16_384

Format = Literal["TSV", "TSV, gzip", "TSV, zstd", "Parquet", "npy"]

_TSV: dict[str, Format] = {"": "TSV", ".gz": "TSV, gzip", ".zst": "TSV, zstd"}
_STEM = r"(?P<stem>day_(?P<day>\d+)|train)"
_NAME = re.compile(rf"{_STEM}(\.tsv|\.txt|)(?P<suffix>|\.gz|\.zst)")
_PARQUET_NAME = re.compile(rf"{_STEM}(\.parquet)?")
_NPY_NAME = re.compile(rf"{_STEM}_(dense|sparse|labels)\.npy")
# Rows at the start and end that distinguish npy files of the same size.
_EDGE = 1024


@dataclass(frozen=True)
class RawRows:
    """Columns of Criteo rows, with 0 for missing values. Dense columns are int64 or float."""

    labels: NDArray[Any]
    dense: Sequence[NDArray[Any]]
    sparse: Sequence[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DayFiles:
    """The file or folder of one day. ``number`` is None if the data is not split into days."""

    name: str
    number: int | None
    format: Format
    path: Path


def find_days(path: Path) -> list[DayFiles]:
    """Return the files of each day at ``path`` in order, or a single file with all days."""
    if path.is_file():
        return [_one_file(path)]
    if not path.is_dir():
        raise DataError(f"{path}: the file or folder does not exist. Correct the path.")
    found = sorted(_in_folder(path), key=lambda day: day.number or 0)
    if not found and any(path.glob("*.parquet")):
        found = [DayFiles(path.name, None, "Parquet", path)]
    if not found:
        raise DataError(
            f"{path}: the folder has no Criteo data. Name the files day_0, day_1... or train, as "
            "TSV (.txt, .tsv, .gz, .zst), .parquet, or _dense.npy, _sparse.npy and _labels.npy."
        )
    numbers = [day.number for day in found]
    first = numbers[0]
    if len(found) > 1 and (first is None or numbers != [*range(first, first + len(found))]):
        names = ", ".join(repr(day.name if day.format == "npy" else day.path.name) for day in found)
        raise DataError(
            f"{path}: the folder must have one file per day for consecutive days, but has {names}. "
            "Add or remove files, or set option 'path' to a single file."
        )
    return found


def _one_file(path: Path) -> DayFiles:
    if path.suffix == ".npy":
        raise DataError(
            f"{path}: this is one of three npy files of a day. Set option 'path' to the folder of "
            "the file."
        )
    kind: Format = "Parquet" if path.suffix == ".parquet" else _TSV.get(path.suffix, "TSV")
    stem = path.name.partition(".")[0]
    # Converted files keep their name, and only these names are searched in a folder.
    return DayFiles(stem if _PARQUET_NAME.fullmatch(stem) else "train", None, kind, path)


def _in_folder(folder: Path) -> Iterator[DayFiles]:
    npy = set()
    for path in sorted(folder.iterdir()):
        if path.is_dir() or path.suffix == ".parquet":
            if (match := _PARQUET_NAME.fullmatch(path.name)) and (
                path.is_file() or any(path.glob("*.parquet"))
            ):
                yield _day(match, "Parquet", path)
        elif match := _NPY_NAME.fullmatch(path.name):
            npy.add(_day(match, "npy", folder))
        elif match := _NAME.fullmatch(path.name):
            yield _day(match, _TSV[match["suffix"]], path)
    yield from npy


def _day(match: re.Match[str], kind: Format, path: Path) -> DayFiles:
    number = None if match["day"] is None else int(match["day"])
    return DayFiles(match["stem"], number, kind, path)


@dataclass(frozen=True)
class Segment:
    """Adjacent rows of a day, within one unit (rows between two positions to start reading)."""

    first_row: int
    num_rows: int


DayRows = Generator[tuple[RawRows, tuple[Origin, ...]], None, None]


class Day(ABC):
    """Rows of one day, stored in one or several files.

    Attributes:
        name: ``day_0`` or ``train``.
        starts: int64 ``[num_units]``, rows at which reads can start; a unit is the rows between.
        num_rows: number of rows, at least 1.
        can_jump: whether reads can start at any unit without extra cost, as shuffling requires.
    """

    name: str
    starts: NDArray[np.int64]
    num_rows: int
    can_jump: bool = True

    @abstractmethod
    def identity(self) -> list[Any]:
        """Return JSON values that identify these rows in a checkpoint, without file paths."""

    def contents(self) -> dict[str, Any]:
        """Return JSON values that identify the content of this day, beyond its name."""
        return {"rows": self.identity()}

    @abstractmethod
    def read(self, segments: Iterable[Segment]) -> DayRows:
        """Yield the rows of the given segments, together with their positions in the files."""

    def segments(self, first_row: int, stop_row: int) -> list[Segment]:
        """Return segments for rows ``first_row`` to ``stop_row - 1``, split at ``starts``."""
        inside = self.starts[(self.starts > first_row) & (self.starts < stop_row)].tolist()
        edges = [first_row, *inside, stop_row]
        return [Segment(start, stop - start) for start, stop in pairwise(edges) if start < stop]


def even_starts(path: Path, num_rows: int) -> NDArray[np.int64]:
    """Return the first row of every ``UNIT_ROWS`` rows, int64 ``[num_units]``."""
    if not num_rows:
        raise DataError(f"{path}: the file has no rows. Remove the file or use another one.")
    return np.arange(0, num_rows, UNIT_ROWS, dtype=np.int64)


class NpyDay(Day):
    """A day in memory-mapped ``NAME_dense.npy``, ``NAME_labels.npy`` and ``NAME_sparse.npy``."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._path = folder / f"{name}_sparse.npy"
        self._sparse = _load(self._path, len(SPARSE))
        self.num_rows = len(self._sparse)
        self._dense = _load(folder / f"{name}_dense.npy", len(DENSE), self.num_rows)
        self._labels = _load(folder / f"{name}_labels.npy", 1, self.num_rows)
        self.starts = even_starts(self._path, self.num_rows)

    def identity(self) -> list[Any]:
        return [self.name, self.num_rows, str(self._sparse.dtype), str(self._dense.dtype)]

    def contents(self) -> dict[str, Any]:
        edges = hashlib.sha256()
        for array in (self._sparse, self._dense, self._labels):
            edges.update(array[:_EDGE].tobytes() + array[-_EDGE:].tobytes())
        return {"rows": self.identity(), "edges": edges.hexdigest()}

    def read(self, segments: Iterable[Segment]) -> DayRows:
        for segment in segments:
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            dense = np.ascontiguousarray(self._dense[rows].T)
            if dense.dtype.kind != "f":
                dense = dense.astype(np.int64)
            sparse = np.ascontiguousarray(self._sparse[rows].T)
            if sparse.dtype == np.int32:  # ids are unsigned, whatever the file's dtype
                sparse = sparse.view(np.uint32)
            ids = sparse.astype(np.int64, copy=False)
            labels = self._labels[rows].reshape(-1)
            origin = Origin(str(self._path), segment.first_row, segment.num_rows)
            yield RawRows(labels, list(dense), list(ids)), (origin,)


def _load(path: Path, width: int, num_rows: int | None = None) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: the file cannot be read: {error}") from error
    wanted = num_rows or len(array)
    if array.shape != (wanted, width) and (array.shape, width) != ((wanted,), 1):
        raise DataError(
            f"{path}: the array has shape {list(array.shape)}, but must have shape "
            f"[{wanted}, {width}]. Write the file again."
        )
    return array


#: Schema of converted files.
SCHEMA = pa.schema(
    [
        pa.field(LABEL, pa.int8(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in (*DENSE, *SPARSE)),
    ]
)


class ParquetDay(Day):
    """A day in one Parquet file, or in all Parquet files of a folder."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._table = parquet.ParquetTable(path)
        there = self._table.schema
        if missing := [column for column in COLUMNS if column not in there.names]:
            raise DataError(
                f"{path}: column {missing[0]!r} is missing. Write the columns "
                f"{', '.join(map(repr, COLUMNS))}."
            )
        # Dense features may be floats that are already transformed.
        floats = [column for column in DENSE if there.field(column).type == pa.float32()]
        self._schema = pa.schema(
            (each.name, pa.float32() if each.name in floats else each.type) for each in SCHEMA
        )
        sizes = [unit.num_rows for unit in self._table.units]
        self.num_rows = sum(sizes)
        if not self.num_rows:
            raise DataError(f"{path}: the table has no rows. Use a table with rows.")
        self.starts = np.array(list(accumulate(sizes, initial=0))[:-1], np.int64)

    def identity(self) -> list[Any]:
        return [self.name, *self._table.identity()]

    def contents(self) -> dict[str, Any]:
        return self._table.contents()

    def read(self, segments: Iterable[Segment]) -> DayRows:
        for rows in self._table.read(self._pieces(segments), self._schema):
            label, *columns = [rows.data.column(name).to_numpy() for name in COLUMNS]
            yield RawRows(label, columns[:13], columns[13:]), rows.origins

    def _pieces(self, segments: Iterable[Segment]) -> Iterator[readers.Piece]:
        for segment in segments:
            unit = int(np.searchsorted(self.starts, segment.first_row, "right")) - 1
            skip = segment.first_row - int(self.starts[unit])
            yield readers.Piece(self._table.units[unit], skip, segment.num_rows)

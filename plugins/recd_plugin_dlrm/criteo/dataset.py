"""Dataset ``dlrm.criteo``, with two id encodings: modulo buckets or a dictionary."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from recd_plugin_dlrm.criteo.days import (
    DENSE,
    LABEL,
    SPARSE,
    Day,
    DayFiles,
    NpyDay,
    ParquetDay,
    RawRows,
    Segment,
    find_days,
)
from recd_plugin_dlrm.criteo.tsv import TsvDay, index_of
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    PluginOptions,
    Reader,
    Rows,
    Split,
    file_utils,
    progress_bars,
    readers,
)

Int64s = NDArray[np.int64]

# Number of ids that are buffered before a sort: more often costs time, less often costs memory.
_FEWEST_WAITING = 1 << 18
MISSING, UNKNOWN, FIRST = 0, 1, 2
_VERSION = 2

#: Maps ids of a feature, given its number, to rows of its table.
IdCoder = Callable[[int, Int64s], Int64s]


class IdCounts:
    """Counts occurrences of the ids of one feature. Call ``flush`` before reading the counts."""

    def __init__(self) -> None:
        self.ids: Int64s = np.empty(0, np.int64)
        self.counts: Int64s = np.empty(0, np.int64)
        self._waiting: list[tuple[Int64s, Int64s]] = []
        self._num_waiting = 0

    def add(self, ids: Int64s, counts: Int64s) -> None:
        """Add distinct ids ``[n]`` and their counts ``[n]`` to the totals."""
        self._waiting.append((ids, counts))
        self._num_waiting += len(ids)
        if self._num_waiting > max(_FEWEST_WAITING, len(self.ids)):
            self.flush()

    def flush(self) -> None:
        """Merge all buffered ids and counts into the totals."""
        ids = np.concatenate([self.ids, *(each for each, _ in self._waiting)])
        counts = np.concatenate([self.counts, *(each for _, each in self._waiting)])
        # Freed before the sort, which needs as much memory.
        self.ids = self.counts = np.empty(0, np.int64)
        self._waiting, self._num_waiting = [], 0
        order = np.argsort(ids, kind="stable")
        ids, counts = ids[order], counts[order]
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        self.ids = ids[starts]
        self.counts = np.add.reduceat(counts, starts) if len(starts) else counts


def write_arrays(path: Path, arrays: dict[str, Int64s]) -> None:
    """Write named arrays of different lengths to one Arrow file that can be memory-mapped."""
    columns = {
        name: pa.LargeListArray.from_arrays(pa.array([0, len(array)], pa.int64()), pa.array(array))
        for name, array in arrays.items()
    }
    batch = pa.record_batch(columns)
    with (
        file_utils.new_file(path) as temporary,
        pa.ipc.new_file(str(temporary), batch.schema) as writer,
    ):
        writer.write_batch(batch)


def read_arrays(path: Path) -> dict[str, Int64s] | None:
    """Return the memory-mapped arrays of a ``write_arrays`` file by name; None if damaged."""
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            batch = reader.get_batch(0)
    except (OSError, pa.ArrowException):
        return None
    return {name: batch.column(name).values.to_numpy() for name in batch.schema.names}


@dataclass(frozen=True)
class CountedRows:
    """A range of rows in which ids are counted to build a dictionary: a day, or part of a file."""

    day: Day
    segments: Sequence[Segment]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.segments)

    def identity(self) -> list[Any]:
        """Return JSON values that identify these rows, as part of a cache key."""
        return [self.day.name, self.day.contents(), self.segments[0].first_row, self.num_rows]

    def count(self, totals: Mapping[str, IdCounts], progress: Callable[[int], None]) -> None:
        """Count the ids of these rows, and add them to ``totals``, keyed by feature name."""
        for rows, _ in self.day.read(self.segments):
            for total, ids in zip(totals.values(), rows.sparse, strict=True):
                total.add(*np.unique(ids, return_counts=True))
            progress(len(rows))


class Dictionary:
    """Maps ids to consecutive numbers.

    ``arrays`` maps each feature NAME to its sorted ids, and ``NAME_codes`` to their numbers.
    """

    def __init__(self, arrays: dict[str, Int64s]) -> None:
        self._ids = [arrays[name] for name in SPARSE]
        self._codes = [arrays[f"{name}_codes"] for name in SPARSE]

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        known, codes = self._ids[feature], self._codes[feature]
        if not len(known):
            return np.where(ids == 0, MISSING, UNKNOWN)
        places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        found = np.where(known[places] == ids, codes[places], UNKNOWN)
        return np.where(ids == 0, MISSING, found)


def dictionary_of(
    cache: Path,
    sections: Sequence[CountedRows],
    threshold: int,
    most_ids: int | None,
) -> Dictionary:
    """Build the dictionary of the given rows, or load it from folder ``cache``.

    Each feature has at most ``most_ids`` numbers. Its less frequent ids, and ids that occur fewer
    than ``threshold`` times, share one number.
    """
    identities = [section.identity() for section in sections]
    key = json.dumps([_VERSION, identities, threshold, most_ids], sort_keys=True)
    path = cache / f"dictionary-{readers.digest(key)}.arrow"
    if (arrays := read_arrays(path)) is not None:
        return Dictionary(arrays)
    totals = {name: IdCounts() for name in SPARSE}
    with progress_bars.row_progress(
        "counting ids", sum(section.num_rows for section in sections)
    ) as progress:
        for section in sections:
            section.count(totals, progress)
    arrays = {}
    for name, total in totals.items():
        total.flush()
        frequent = (total.counts >= threshold) & (total.ids != 0)
        ids, often = total.ids[frequent], total.counts[frequent]
        chosen = ids[np.lexsort((ids, -often))]
        if most_ids is not None:
            chosen = chosen[: most_ids - FIRST]
        by_id = np.argsort(chosen)
        arrays |= {name: chosen[by_id], f"{name}_codes": by_id + FIRST}
    write_arrays(path, arrays)
    return Dictionary(arrays)


SCHEMA = pa.schema(
    [(name, pa.int64()) for name in SPARSE]
    + [(name, pa.float32()) for name in DENSE]
    + [(LABEL, pa.int8())]
)


class Buckets:
    """Maps ids to table rows by modulo. ``buckets`` maps feature patterns to numbers of rows."""

    def __init__(self, buckets: int | Mapping[str, int]) -> None:
        by_pattern = {"*": buckets} if isinstance(buckets, int) else buckets
        for pattern in by_pattern:
            if not any(fnmatchcase(name, pattern) for name in SPARSE):
                raise DataError(
                    f"option 'buckets': {pattern!r} matches no feature. Use {SPARSE[0]!r} to "
                    f"{SPARSE[-1]!r}, or a pattern."
                )
        self.sizes = []
        for name in SPARSE:
            matches = [each for each in by_pattern if fnmatchcase(name, each)]
            if not matches:
                raise DataError(
                    f"option 'buckets': feature {name!r} is missing. Add the feature, or the "
                    "pattern '*' for all other features."
                )
            self.sizes.append(by_pattern[matches[0]])

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        return np.asarray(ids % self.sizes[feature])


def raw_ids(feature: int, ids: Int64s) -> Int64s:  # noqa: ARG001
    """Return ids unchanged, for datasets that hash ids in a later preprocessing step."""
    return ids


def encode(
    rows: RawRows, path: str, coder: IdCoder, dense: Literal["log1p", "stored"] | None
) -> pa.RecordBatch:
    """Encode raw rows of file ``path`` with the columns of ``SCHEMA``. Labels must be 0 or 1."""
    labels = rows.labels.astype(np.int8)
    if (wrong := (labels != rows.labels) | (labels >> 1 != 0)).any():
        file = path.replace("_sparse.npy", "_labels.npy")
        raise DataError(
            f"{file}: label {rows.labels[wrong][0]} is neither 0 nor 1. Write all labels as 0 or 1."
        )
    columns: Sequence[NDArray[Any]] = [
        *(coder(feature, ids) for feature, ids in enumerate(rows.sparse)),
        *(_floats(values, dense) for values in rows.dense),
        labels,
    ]
    return pa.record_batch(list(map(pa.array, columns)), schema=SCHEMA)


def _floats(values: NDArray[Any], dense: Literal["log1p", "stored"] | None) -> NDArray[np.float32]:
    if dense == "stored" or (dense is None and values.dtype.kind == "f"):
        return values.astype(np.float32)
    # As in DLRM's data_utils.py: negative numbers become 0, then log(x + 1) in float32.
    return np.log(np.maximum(values, 0).astype(np.float32) + np.float32(1))


#: Default folder, beside the data, for indexes and dictionaries.
CACHE = ".recd-criteo"


class Criteo(Dataset):
    """Dataset of Criteo's click logs (Kaggle or Terabyte) in TSV, Parquet or npy files."""

    name = "dlrm.criteo"
    free_options = frozenset({"path", "cache", "prefetch"})
    row_options = frozenset({"shuffle", "seed"})

    class Options(PluginOptions):
        path: Path = Field(
            description=(
                "The file train.txt, or a folder with day_0, day_1... or train: TSV, "
                "plain, .gz or .zst, .parquet, or three npy files per day."
            )
        )
        evaluate: Literal["test", "validation", "last_day", "nothing"] = Field(
            default="test",
            description=(
                "Rows to evaluate: the second half of the last day (test), its first "
                "half (validation), the whole last day (last_day), or none (nothing), "
                "which trains on all days."
            ),
        )
        parts: int = Field(
            default=7,
            ge=2,
            description="Number of days in a single file; they count as equally long.",
        )
        dense: Literal["log1p", "stored"] | None = Field(
            default=None,
            description=(
                "Transform of dense features: log1p is log(x + 1), and 0 for negative "
                "values; stored keeps them. null uses log1p for integers and stored for "
                "floats."
            ),
        )
        categorical: Literal["hashed", "dictionary", "raw"] = Field(
            default="hashed",
            description=(
                "How ids are mapped to table rows: modulo (hashed), by a dictionary of "
                "the training days (dictionary), or not at all (raw)."
            ),
        )
        buckets: PositiveInt | dict[str, PositiveInt] = Field(
            default=100_000, description="With hashed: rows of every table, or by name or pattern."
        )
        threshold: PositiveInt = Field(
            default=3, description="With dictionary: ids that occur less often share row 1."
        )
        max_ids: int | None = Field(
            default=None, ge=2, description="With dictionary: maximum rows of a table."
        )
        cache: Path | None = Field(
            default=None,
            description="Folder for indexes and dictionaries; null: .recd-criteo beside the data.",
        )
        shuffle: bool = Field(
            default=False, description="Shuffle the order of row blocks in each epoch."
        )
        seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
        prefetch: NonNegativeInt = Field(
            default=4,
            description="Batches that a thread reads ahead; 0 reads in the trainer's thread.",
        )

    options: Options

    def prepare(self) -> None:
        """Index the TSV files and build the id dictionary, unless both are cached."""
        days = self._days
        if self.options.shuffle and not all(day.can_jump for day in days):
            raise DataError(
                f"{self.options.path}: compressed files cannot be shuffled. Set shuffle: false, or "
                "convert the files with recd criteo convert."
            )
        _ = self._coder

    def identity(self) -> dict[str, Any]:
        return {"days": {day.name: day.contents() for day in self._days}}

    def schema(self) -> FeatureSchema:
        return FeatureSchema(SPARSE, DENSE, LABEL)

    def splits(self) -> tuple[Split, ...]:
        return ("train",) if self.options.evaluate == "nothing" else ("train", "test")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        options = self.options
        if split not in self.splits():
            raise DataError(
                "dataset 'dlrm.criteo' has no test split, because option 'evaluate' is 'nothing'. "
                "Set 'evaluate' to 'test', 'validation' or 'last_day'."
            )
        units = tuple(
            readers.Unit(number, group, segment.first_row, segment.num_rows)
            for number, segments in self._rows_of(split)
            for group, segment in enumerate(segments)
        )
        shuffle = options.shuffle and split == "train"
        encoding = {"categorical", "dense", "buckets", "threshold", "max_ids"}
        return readers.PlannedReader(
            readers.ReadPlan(units, batch_size, shuffle=shuffle, seed=options.seed),
            self._read,
            data={
                "split": split,
                "files": readers.digest([day.identity() for day in self._days]),
                "parts": [options.evaluate, options.parts],
                "encoding": readers.digest(options.model_dump_json(include=encoding)),
            },
            what=f"{options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )

    def _read(self, pieces: Iterator[readers.Piece]) -> Generator[Rows, None, None]:
        for number, run in groupby(pieces, key=lambda piece: piece.unit.file):
            segments = (Segment(piece.unit.first_row + piece.skip, piece.num_rows) for piece in run)
            for rows, origins in self._days[number].read(segments):
                yield Rows(encode(rows, origins[0].path, self._coder, self.options.dense), origins)

    def _rows_of(self, split: Split) -> list[tuple[int, list[Segment]]]:
        """Return pairs of a file number and its row segments that belong to the split.

        As in torchrec.datasets.criteo, the first half of the last day is for validation and the
        second half for testing. As in DLRM, a single file is divided into days of equal length.
        """
        sizes = [day.num_rows for day in self._days]
        days = [(number, 0, size) for number, size in enumerate(sizes)]
        if len(days) == 1:
            parts = self.options.parts
            size, more = divmod(sizes[0], parts)
            edges = [part * size + min(part, more) for part in range(parts + 1)]
            days = [(0, first, stop) for first, stop in pairwise(edges)]
        number, first, stop = days[-1]
        middle = stop - (stop - first) // 2
        held_out: Mapping[str, tuple[int, int]] = {
            "test": (middle, stop),
            "validation": (first, middle),
            "last_day": (first, stop),
        }
        if split == "test":
            days = [(number, *held_out[self.options.evaluate])]
        elif self.options.evaluate != "nothing":
            del days[-1]
        return [(number, self._days[number].segments(*rows)) for number, *rows in days]

    @property
    def _cache(self) -> Path:
        path = self.options.path
        return self.options.cache or (path if path.is_dir() else path.parent) / CACHE

    @cached_property
    def _days(self) -> list[Day]:
        return [self._open(files) for files in find_days(self.options.path)]

    def _open(self, files: DayFiles) -> Day:
        if files.format == "Parquet":
            return ParquetDay(files.name, files.path)
        if files.format == "npy":
            return NpyDay(files.name, files.path)
        return TsvDay(files.name, files.path, index_of(files.path, self._cache))

    @cached_property
    def _coder(self) -> IdCoder:
        options = self.options
        if options.categorical == "raw":
            return raw_ids
        if options.categorical == "hashed":
            return Buckets(options.buckets)
        sections = [
            CountedRows(self._days[number], segments)
            for number, segments in self._rows_of("train")
            if segments
        ]
        return dictionary_of(self._cache, sections, options.threshold, options.max_ids)

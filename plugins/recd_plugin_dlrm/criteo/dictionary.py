"""Coding Criteo's ids: modulo buckets, or by a dictionary of the training days."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.days import DENSE, LABEL, SPARSE, Day, RawRows, Stretch
from recd_plugins.api import DataError, digest, new_file, row_progress

Int64s = NDArray[np.int64]

# Ids that wait before they are sorted: sorting often costs time, seldom memory.
_FEWEST_WAITING = 1 << 18
MISSING, UNKNOWN, FIRST = 0, 1, 2
_VERSION = 2

#: Maps ids of a feature, by its number, to rows of its table.
IdCoder = Callable[[int, Int64s], Int64s]


class IdCounts:
    """Sorted ids of one feature and their counts, complete after ``flush``."""

    def __init__(self) -> None:
        self.ids: Int64s = np.empty(0, np.int64)
        self.counts: Int64s = np.empty(0, np.int64)
        self._waiting: list[tuple[Int64s, Int64s]] = []
        self._num_waiting = 0

    def add(self, ids: Int64s, counts: Int64s) -> None:
        """Add distinct ids and their counts."""
        self._waiting.append((ids, counts))
        self._num_waiting += len(ids)
        if self._num_waiting > max(_FEWEST_WAITING, len(self.ids)):
            self.flush()

    def flush(self) -> None:
        """Sort in what waits."""
        ids = np.concatenate([self.ids, *(each for each, _ in self._waiting)])
        counts = np.concatenate([self.counts, *(each for _, each in self._waiting)])
        # Freed before the sort, which takes as much.
        self.ids = self.counts = np.empty(0, np.int64)
        self._waiting, self._num_waiting = [], 0
        order = np.argsort(ids, kind="stable")
        ids, counts = ids[order], counts[order]
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        self.ids = ids[starts]
        self.counts = np.add.reduceat(counts, starts) if len(starts) else counts


def write_arrays(path: Path, arrays: dict[str, Int64s]) -> None:
    """Write arrays of any lengths as one Arrow file, which can be memory-mapped."""
    columns = {
        name: pa.LargeListArray.from_arrays(pa.array([0, len(array)], pa.int64()), pa.array(array))
        for name, array in arrays.items()
    }
    batch = pa.record_batch(columns)
    with new_file(path) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as writer:
        writer.write_batch(batch)


def read_arrays(path: Path) -> dict[str, Int64s] | None:
    """Memory-map a file of ``write_arrays``; None if it is missing or damaged."""
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            batch = reader.get_batch(0)
    except (OSError, pa.ArrowException):
        return None
    return {name: batch.column(name).values.to_numpy() for name in batch.schema.names}


@dataclass(frozen=True)
class CountedRows:
    """Rows that are counted in one go: a day, or the training rows of a file."""

    day: Day
    stretches: Sequence[Stretch]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.stretches)

    def identity(self) -> list[Any]:
        """Return JSON values that name the rows."""
        return [self.day.name, self.day.contents(), self.stretches[0].first_row, self.num_rows]

    def counts(self, progress: Callable[[int], None]) -> dict[str, Int64s]:
        """Return ids by feature, and their counts under ``NAME_counts``."""
        features = {name: IdCounts() for name in SPARSE}
        for rows, _ in self.day.read(self.stretches):
            for feature, ids in zip(features.values(), rows.sparse, strict=True):
                feature.add(*np.unique(ids, return_counts=True))
            progress(len(rows))
        arrays: dict[str, Int64s] = {}
        for name, feature in features.items():
            feature.flush()
            arrays |= {name: feature.ids, f"{name}_counts": feature.counts}
        return arrays


class Dictionary:
    """An IdCoder by sorted ids of each feature, and their numbers under ``NAME_codes``."""

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
    """Return the dictionary of some rows, kept in ``cache`` or made now.

    Counts of each section are kept until all are there, so that a killed run goes on. Ids that
    occur less than ``threshold`` times have no number of their own, nor those beyond ``most_ids``.
    """
    identities = [section.identity() for section in sections]
    path = _place(cache, "dictionary", identities, threshold, most_ids)
    if (arrays := read_arrays(path)) is not None:
        return Dictionary(arrays)
    totals = {name: IdCounts() for name in SPARSE}
    kept = [_place(cache, "counts", identity) for identity in identities]
    with row_progress("counting ids", sum(section.num_rows for section in sections)) as progress:
        for section, part in zip(sections, kept, strict=True):
            if (counts := read_arrays(part)) is None:
                counts = section.counts(progress)
                write_arrays(part, counts)
            for name, total in totals.items():
                total.add(counts[name], counts[f"{name}_counts"])
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
    for part in kept:
        part.unlink(missing_ok=True)
    return Dictionary(arrays)


def _place(cache: Path, kind: str, *identity: object) -> Path:
    return cache / f"{kind}-{digest(json.dumps([_VERSION, *identity], sort_keys=True))}.arrow"


SCHEMA = pa.schema(
    [(name, pa.int64()) for name in SPARSE]
    + [(name, pa.float32()) for name in DENSE]
    + [(LABEL, pa.int8())]
)


class Buckets:
    """An IdCoder that takes ids modulo the rows of their table, as DLRM's ``--max-ind-range``.

    ``buckets`` are of every feature, or by name or pattern; the first match counts.
    """

    def __init__(self, buckets: int | Mapping[str, int]) -> None:
        by_pattern = {"*": buckets} if isinstance(buckets, int) else buckets
        for pattern in by_pattern:
            if not any(fnmatchcase(name, pattern) for name in SPARSE):
                raise DataError(
                    f"{pattern} of option buckets matches no feature; they are {SPARSE[0]} to "
                    f"{SPARSE[-1]}"
                )
        self.sizes = []
        for name in SPARSE:
            matches = [each for each in by_pattern if fnmatchcase(name, each)]
            if not matches:
                raise DataError(
                    f"option buckets says nothing of {name}; a pattern * takes all others"
                )
            self.sizes.append(by_pattern[matches[0]])

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        return np.asarray(ids % self.sizes[feature])


def raw_ids(feature: int, ids: Int64s) -> Int64s:  # noqa: ARG001
    """Return ids as they are stored, for a preprocessing that hashes them."""
    return ids


def encode(
    rows: RawRows, path: str, coder: IdCoder, dense: Literal["log1p", "stored"] | None
) -> pa.RecordBatch:
    """Return rows of a file with the columns and types of ``SCHEMA``.

    Raises:
        DataError: a label is neither 0 nor 1.
    """
    labels = rows.labels.astype(np.int8)
    if (wrong := (labels != rows.labels) | (labels >> 1 != 0)).any():
        raise DataError(f"{path}: label {rows.labels[wrong][0]} is neither 0 nor 1")
    columns: Sequence[NDArray[Any]] = [
        *(coder(feature, ids) for feature, ids in enumerate(rows.sparse)),
        *(_floats(values, dense) for values in rows.dense),
        labels,
    ]
    return pa.record_batch(list(map(pa.array, columns)), schema=SCHEMA)


def _floats(values: NDArray[Any], dense: Literal["log1p", "stored"] | None) -> NDArray[np.float32]:
    if dense == "stored" or (dense is None and values.dtype.kind == "f"):
        return values.astype(np.float32)
    # DLRM's data_utils.py: negative numbers are 0, and then log(x + 1) in float32.
    return np.log(np.maximum(values, 0).astype(np.float32) + np.float32(1))

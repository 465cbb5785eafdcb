"""How often each id of a feature occurs, counted while rows stream by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_dlrm.criteo.days import DENSE, LABEL, SPARSE, Day, RawRows, Stretch
from recd_plugins.api import DataError, RecdError, digest, new_file

Int64s = NDArray[np.int64]

# Ids that wait before they are sorted: sorting often costs time, seldom memory.
_FEWEST_WAITING = 1 << 18


class IdCounts:
    """Counts of one feature.

    Attributes:
        ids: int64 ``[num_ids]``, sorted; complete after ``flush``.
        counts: how often, int64 ``[num_ids]``.
    """

    def __init__(self) -> None:
        self.ids: Int64s = np.empty(0, np.int64)
        self.counts: Int64s = np.empty(0, np.int64)
        self._waiting: list[Int64s] = []
        self._waiting_counts: list[Int64s] = []
        self._num_waiting = 0

    def add(self, ids: Int64s) -> None:
        """Count ids, in any order."""
        self.add_counted(*np.unique(ids, return_counts=True))

    def add_counted(self, ids: Int64s, counts: Int64s) -> None:
        """Add what was counted elsewhere."""
        self._waiting.append(ids)
        self._waiting_counts.append(counts)
        self._num_waiting += len(ids)
        if self._num_waiting > max(_FEWEST_WAITING, len(self.ids)):
            self.flush()

    def flush(self) -> None:
        """Sort in what waits."""
        ids = np.concatenate([self.ids, *self._waiting])
        counts = np.concatenate([self.counts, *self._waiting_counts])
        # Gone before the sort, which takes as much.
        self.ids = self.counts = np.empty(0, np.int64)
        self._waiting, self._waiting_counts, self._num_waiting = [], [], 0
        order = np.argsort(ids, kind="stable")
        ids, counts = ids[order], counts[order]
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        self.ids = ids[starts]
        self.counts = np.add.reduceat(counts, starts) if len(starts) else counts


def write_arrays(path: Path, arrays: dict[str, Int64s], metadata: dict[bytes, bytes]) -> None:
    """Arrays of any lengths as one file that can be memory-mapped; appears when it is complete.

    Raises:
        RecdError: the place cannot be written.
    """
    columns = {
        name: pa.LargeListArray.from_arrays(pa.array([0, len(array)], pa.int64()), pa.array(array))
        for name, array in arrays.items()
    }
    batch = pa.record_batch(columns).replace_schema_metadata(metadata)
    with (
        new_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)


def read_arrays(path: Path, provenance: bytes) -> dict[str, Int64s] | None:
    """What ``write_arrays`` wrote, memory-mapped; None where it is not there or other data."""
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            if (reader.schema.metadata or {}).get(b"provenance") != provenance:
                return None
            batch = reader.get_batch(0)
    except (OSError, pa.ArrowException):
        return None
    return {
        name: batch.column(name).values.to_numpy(zero_copy_only=True) for name in batch.schema.names
    }


def counted(features: Sequence[IdCounts]) -> dict[str, Int64s]:
    """Ids by the name of their feature, and under ``NAME_counts`` how often each occurs."""
    arrays = {}
    for name, feature in zip(SPARSE, features, strict=True):
        feature.flush()
        arrays[name], arrays[f"{name}_counts"] = feature.ids, feature.counts
    return arrays


MISSING, UNKNOWN, FIRST = 0, 1, 2
_VERSION = 1


@dataclass(frozen=True)
class CountedRows:
    """Rows that are counted in one go: a day, or of a file its share of training rows."""

    day: Day
    stretches: Sequence[Stretch]

    def identity(self) -> list[Any]:
        """JSON values."""
        first = self.stretches[0].first_row
        return [*self.day.provenance(), first, sum(part.num_rows for part in self.stretches)]


class Dictionary:
    """Codes ids; see this module.

    Args:
        arrays: by feature its ids, sorted, and under ``NAME_codes`` their numbers.
    """

    def __init__(self, arrays: dict[str, Int64s]) -> None:
        self._ids = [arrays[name] for name in SPARSE]
        self._codes = [arrays[f"{name}_codes"] for name in SPARSE]

    @property
    def sizes(self) -> list[int]:
        """Rows that the table of each feature needs."""
        return [FIRST + len(ids) for ids in self._ids]

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        known, codes = self._ids[feature], self._codes[feature]
        if not len(known):
            return np.where(ids == 0, MISSING, UNKNOWN)
        places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        found = np.where(known[places] == ids, codes[places], UNKNOWN)
        return np.where(ids == 0, MISSING, found)


class DictionaryFile:
    """Where the dictionary of some rows is kept, and made where it is not.

    Args:
        cache: the folder.
        sections: what is counted.
        threshold: ids that occur less often have none of their own.
        most_ids: rows of a table at most; the most frequent ids have them.
    """

    def __init__(
        self, cache: Path, sections: Sequence[CountedRows], threshold: int, most_ids: int | None
    ) -> None:
        self._cache = cache
        self._sections = sections
        self._threshold = threshold
        self._most_ids = most_ids
        identities = [section.identity() for section in sections]
        self._provenance = json.dumps(
            [_VERSION, identities, threshold, most_ids], sort_keys=True
        ).encode()
        self.path = cache / f"dictionary-{digest(self._provenance.decode())}.arrow"

    def load(self) -> Dictionary | None:
        """The dictionary, if it was made before of these rows with these options."""
        arrays = read_arrays(self.path, self._provenance)
        return None if arrays is None else Dictionary(arrays)

    def make(self, progress: Callable[[int], None]) -> Dictionary:
        """Count the ids of all sections, and keep the dictionary.

        Each section's counts are kept until all are there: a run that was killed goes on.

        Args:
            progress: takes rows done since the last call.

        Raises:
            DataError: rows cannot be read, or the folder cannot be written.
        """
        totals = [IdCounts() for _ in SPARSE]
        kept = []
        try:
            for section in self._sections:
                provenance = json.dumps([_VERSION, section.identity()]).encode()
                path = self._cache / f"counts-{digest(provenance.decode())}.arrow"
                kept.append(path)
                if (counts := read_arrays(path, provenance)) is None:
                    counts = counted(_count(section, progress))
                    write_arrays(path, counts, {b"provenance": provenance})
                for name, total in zip(SPARSE, totals, strict=True):
                    total.add_counted(counts[name], counts[f"{name}_counts"])
            arrays: dict[str, Int64s] = {}
            for name, total in zip(SPARSE, totals, strict=True):
                total.flush()
                arrays[name], arrays[f"{name}_codes"] = self._choose(total)
            write_arrays(self.path, arrays, {b"provenance": self._provenance})
        except DataError:
            raise
        except RecdError as error:
            raise DataError(f"{error}; option cache names another folder") from error
        for path in kept:
            path.unlink(missing_ok=True)
        return Dictionary(arrays)

    def _choose(self, total: IdCounts) -> tuple[Int64s, Int64s]:
        """The ids with a number of their own, sorted, and their numbers."""
        frequent = (total.counts >= self._threshold) & (total.ids != 0)
        ids, counts = total.ids[frequent], total.counts[frequent]
        order = np.lexsort((ids, -counts))
        if self._most_ids is not None:
            order = order[: max(0, self._most_ids - FIRST)]
        chosen = ids[order]
        by_id = np.argsort(chosen)
        return chosen[by_id], by_id + FIRST


def _count(section: CountedRows, progress: Callable[[int], None]) -> list[IdCounts]:
    counts = [IdCounts() for _ in SPARSE]
    for rows, _ in section.day.read(section.stretches):
        for feature, ids in zip(counts, rows.sparse, strict=True):
            feature.add(ids)
        progress(len(rows))
    return counts


DenseWord = Literal["log1p", "stored"]

_FIELDS = (
    *(pa.field(name, pa.int64()) for name in SPARSE),
    *(pa.field(name, pa.float32()) for name in DENSE),
    pa.field(LABEL, pa.int8()),
)
SCHEMA = pa.schema(_FIELDS)


class IdCoder(Protocol):
    """Ids of one feature to those of its table."""

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        """Of the feature by its number."""


class Buckets:
    """Ids modulo the rows of their table, as ``--max-ind-range`` of DLRM has it.

    Args:
        buckets: of every feature, or of each by name or pattern; the first match counts.

    Raises:
        DataError: a pattern matches no feature, or a feature no pattern.
    """

    def __init__(self, buckets: int | Mapping[str, int]) -> None:
        by_pattern = {"*": buckets} if isinstance(buckets, int) else dict(buckets)
        for pattern in by_pattern:
            if not any(fnmatchcase(name, pattern) for name in SPARSE):
                raise DataError(
                    f"{pattern} of option buckets matches no feature; they are {SPARSE[0]} to "
                    f"{SPARSE[-1]}"
                )
        self.sizes = [_first_match(name, by_pattern) for name in SPARSE]

    def __call__(self, feature: int, ids: Int64s) -> Int64s:
        return np.asarray(ids % self.sizes[feature])


def raw_ids(feature: int, ids: Int64s) -> Int64s:  # noqa: ARG001
    """Ids as they are stored: for a preprocessing that hashes them."""
    return ids


def encode(rows: RawRows, coder: IdCoder, dense: DenseWord | None) -> pa.RecordBatch:
    """Rows with the columns and types of ``SCHEMA``."""
    columns: Sequence[NDArray[Any]] = [
        *(coder(feature, ids) for feature, ids in enumerate(rows.sparse)),
        *(_floats(values, dense) for values in rows.dense),
        rows.labels,
    ]
    return pa.record_batch(list(map(pa.array, columns)), schema=SCHEMA)


def _floats(values: NDArray[Any], dense: DenseWord | None) -> NDArray[np.float32]:
    if dense is None:
        dense = "stored" if values.dtype.kind == "f" else "log1p"
    if dense == "stored":
        return values.astype(np.float32)
    # DLRM's data_utils.py: nothing is 0, so are negative numbers, and then log(x + 1) in float32.
    return np.log(np.maximum(values, 0).astype(np.float32) + np.float32(1))


def _first_match(name: str, by_pattern: Mapping[str, int]) -> int:
    for pattern, size in by_pattern.items():
        if fnmatchcase(name, pattern):
            return size
    raise DataError(f"option buckets says nothing of {name}; a pattern * takes all others")

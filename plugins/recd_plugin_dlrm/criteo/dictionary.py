"""A dictionary for every feature: ids that are frequent enough get small numbers of their own.

0 is a missing id, 1 every id that is too rare, or was not there when the dictionary was made; from
2 on come the others, the most frequent first, and of equally frequent ones the smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recd_plugin_dlrm.criteo.day import Day, Stretch
from recd_plugin_dlrm.criteo.id_counts import (
    IdCounts,
    Int64s,
    counted,
    read_arrays,
    write_arrays,
)
from recd_plugin_dlrm.criteo.rows import SPARSE
from recd_plugins.api import DataError, RecdError
from recd_plugins.api.reading import digest

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

"""Store of events: a Parquet file with each user's events once, sorted by user and time.

Users are sorted by a hash of their ids. Readers copy the columns once to memory-mapped arrays in
the cache folder, and keep an index of the users in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_tables.spill import ranges
from recd_plugin_tables.values import mixed
from recd_plugins.api import DataError, file_utils, folders, list_dict, parquet, readers

#: Key of the store's metadata in the Parquet footer.
METADATA = b"recd.histories"
_NOTE = "index.json"


@dataclass(frozen=True)
class ItemNote:
    """An item column: its name, type category (``kinds.sort_of``), and first value as JSON."""

    name: str
    kind: str
    sample: Any


@dataclass(frozen=True)
class StoreNote:
    """Metadata of a store.

    Attributes:
        user, time: names of the columns with the user ids and the times.
        user_kind: type category (``kinds.sort_of``) of the user ids in the event log.
        unit: unit of numeric times in the event log; None for other types of times.
        items: the item columns.
    """

    user: str
    time: str
    user_kind: str
    unit: str | None
    items: Sequence[ItemNote]

    @classmethod
    def from_json(cls, text: bytes) -> StoreNote:
        """Parse the metadata of a store."""
        found = file_utils.parse_json(text)
        return cls(**{**found, "items": [ItemNote(**each) for each in found["items"]]})


class EventStore:
    """Reads the events before a time of each user. Opens ``path`` on first use.

    Args:
        path: a file of ``recd histories build``.
        cache: folder for the memory-mapped copy.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self.path, self._cache = path, cache

    @cached_property
    def note(self) -> StoreNote:
        """Metadata of the store.

        Raises:
            DataError: the file is missing, or another program wrote it.
        """
        text = (parquet.read_metadata(self.path).metadata or {}).get(METADATA)
        if text is None:
            raise DataError(
                f"{self.path}: this file is not a store of events. Write one with recd histories "
                f"build EVENTS {self.path}."
            )
        return StoreNote.from_json(text)

    def contents(self) -> dict[str, Any]:
        """Return JSON values that identify the events, independent of the file's location."""
        return {"events": list(self._table.contents().values())}

    def windows(
        self, users: NDArray[np.int64], times: NDArray[np.int64], last: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the range of the last events strictly before a time, for each user and time.

        Args:
            users: ids of users ``[B]``. Unknown users have an empty range.
            times: microseconds since 1970 ``[B]``.
            last: maximum number of events.

        Returns:
            First and end index of each range, int64 ``[B]``; both 0 if it is empty.
        """
        starts, stops = np.zeros((2, len(users)), np.int64)
        index = self._users, self._offsets, self._array("time")
        _find_windows(*index, mixed(users), times, last, starts, stops)
        return starts, stops

    def lists(
        self, item: str, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> pa.DictionaryArray:
        """Return the ids of ranges of ``windows`` as a column in layout ``list_dict``."""
        # The end of a range that is not empty determines its user, and so its start.
        ends, rows, codes = np.unique(stops, return_index=True, return_inverse=True)
        offsets, places = ranges(starts[rows], ends)
        number = [each.name for each in self.note.items].index(item)
        ids = self._array(f"item{number}")[places]
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32)), list_dict.to_list_dict(lists)
        )

    def prepare(self) -> tuple[int, int]:
        """Create the memory-mapped copy if needed. Return the first and last time of all events.

        Raises:
            DataError: the events are not sorted by user and time.
        """
        return self._copied["first"], self._copied["last"]

    @cached_property
    def _table(self) -> parquet.ParquetTable:
        return parquet.ParquetTable(self.path)

    @cached_property
    def _folder(self) -> Path:
        return self._cache / f"{self.path.stem}-{readers.digest(self.contents())}"

    @cached_property
    def _copied(self) -> dict[str, int]:
        found = file_utils.read_note(self._folder / _NOTE)
        if found is None:
            _ = self.note
            waits = f"{self.path}: waiting for another process that reads this store"
            with folders.work_folder(
                self._folder,
                "copy",
                self.contents(),
                lambda _: None,
                waits=lambda: print(waits, file=sys.stderr),
            ) as work:
                if (found := file_utils.read_note(self._folder / _NOTE)) is None:
                    work.table.mkdir(exist_ok=True)
                    found = self._copy(work.table)
                    file_utils.write_note(work.table / _NOTE, found)
                    work.publish(self._folder)
        return dict(found)

    def _copy(self, folder: Path) -> dict[str, int]:
        """Write the columns as NumPy files. Return the first and the last time."""
        note, table = self.note, self._table
        names = {note.time: "time"} | {each.name: f"item{n}" for n, each in enumerate(note.items)}
        num_events = sum(unit.num_rows for unit in table.units)
        arrays = {
            name: np.lib.format.open_memmap(folder / f"{short}.npy", "w+", np.int64, (num_events,))
            for name, short in names.items()
        }
        users, offsets, before, at = [], [], (-1, 0), 0
        pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in table.units)
        schema = pa.schema([table.schema.field(name) for name in (note.user, *names)])
        for rows in table.read(pieces, schema):
            for name, array in arrays.items():
                array[at : at + len(rows)] = rows.data[name].to_numpy()
            keys, times = mixed(rows.data[note.user].to_numpy()), rows.data[note.time].to_numpy()
            is_new = np.concatenate([[int(keys[0]) != before[0]], keys[1:] != keys[:-1]])
            later = np.concatenate([[int(times[0]) >= before[1]], times[1:] >= times[:-1]])
            greater = np.concatenate([[int(keys[0]) > before[0]], keys[1:] > keys[:-1]])
            wrong = np.where(is_new, ~greater, ~later)
            if wrong.any():
                raise DataError(
                    f"{rows.place_of(int(wrong.argmax()))}: the events are not sorted by user and "
                    f"time. Write the store again with recd histories build EVENTS {self.path}."
                )
            users.append(keys[is_new])
            offsets.append(at + np.flatnonzero(is_new))
            before, at = (int(keys[-1]), int(times[-1])), at + len(rows)
        np.save(folder / "users.npy", np.concatenate(users))
        np.save(folder / "offsets.npy", np.concatenate([*offsets, [num_events]]))
        times = arrays[note.time]
        return {"first": int(times.min()), "last": int(times.max())}

    @cached_property
    def _users(self) -> NDArray[np.uint64]:
        return np.array(self._array("users"))

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return np.array(self._array("offsets"))

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._arrays:
            self._arrays[name] = np.load(self._folder / f"{name}.npy", mmap_mode="r")
        return self._arrays[name]

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        self.prepare()
        return {}


@numba.njit(cache=True, nogil=True)
def _find_windows(
    known: Any, offsets: Any, times: Any, users: Any, at: Any, last: Any, starts: Any, stops: Any
) -> None:
    """Find the last events of each user before a time, for ``EventStore.windows``."""
    for row in range(len(users)):
        if row and users[row] == users[row - 1] and at[row] == at[row - 1]:
            starts[row], stops[row] = starts[row - 1], stops[row - 1]
            continue
        user = np.searchsorted(known, users[row])
        if user == len(known) or known[user] != users[row]:
            continue
        first, low, high = offsets[user], offsets[user], offsets[user + 1]
        while low < high:
            middle = (low + high) // 2
            if times[middle] < at[row]:
                low = middle + 1
            else:
                high = middle
        if low > first:
            starts[row], stops[row] = max(first, low - last), low

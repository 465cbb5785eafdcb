"""Store of events: a Parquet file with each user's events once, sorted by user and time.

Users are sorted by a hash of their ids. All events of a user are in one row group. Time and item
columns are uncompressed, in PLAIN encoding. Each row group has one page per column. Readers map
these pages into memory, and keep an index of the users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recd_plugin_tables.values import mixed
from recd_plugins.api import DataError, file_utils, list_dict, parquet, readers

#: Key of the store's metadata in the Parquet footer.
METADATA = b"recd.histories"
# Maximum bytes of the header of a page.
_HEADER = 1024


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
        step: number of microseconds in one unit of the stored times.
        items: the item columns.
    """

    user: str
    time: str
    user_kind: str
    unit: str | None
    step: int
    items: Sequence[ItemNote]


def check_replaceable(path: Path) -> None:
    """Raise DataError if ``path`` exists but is not a store of events."""
    if path.exists() and METADATA not in (_metadata(path) or {}):
        raise DataError(
            f"{path}: this file is not a store of events, so it is not replaced. Write to another "
            "file, or rename this file."
        )


def _metadata(path: Path) -> dict[bytes, bytes] | None:
    try:
        return pq.read_schema(path).metadata
    except (OSError, pa.ArrowInvalid):
        return None


class EventStore:
    """Reads a user's events before a given time. Opens the file ``path`` on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def note(self) -> StoreNote:
        """Metadata of the store.

        Raises:
            DataError: the file is missing, or another program wrote it.
        """
        (location,) = self._table.locations
        text = (parquet.read_metadata(location).metadata or {}).get(METADATA)
        if text is None:
            raise DataError(
                f"{self.path}: this file is not a store of events. Write one with recd histories "
                f"build EVENTS {self.path}."
            )
        found = file_utils.parse_json(text)
        return StoreNote(**{**found, "items": [ItemNote(**each) for each in found["items"]]})

    def contents(self) -> dict[str, Any]:
        """Return a fingerprint of the events, the file's size and footer digest, as JSON values."""
        return {"events": list(self._table.contents().values())}

    def windows(
        self, users: NDArray[np.int64], times: NDArray[np.int64], last: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the range of each user's last events strictly before a time.

        Args:
            users: ids of users ``[B]``. Unknown users have an empty range.
            times: microseconds since 1970 ``[B]``.
            last: maximum number of events.

        Returns:
            The first and end (exclusive) event index of each range, int64 ``[B]``. Both are 0 if
            the range is empty.
        """
        keys, (known, offsets) = mixed(users), self._users
        number = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        begins, stops = offsets[number], offsets[number + (known[number] == keys)]
        # A stored time t is before a row if t * step < time.
        before = -(-times // self.note.step)
        groups = np.searchsorted(self._firsts, begins, "right") - 1
        for group in np.unique(groups).tolist():
            rows, first = np.flatnonzero(groups == group), self._firsts[group]
            found = begins[rows] - first, stops[rows] - first, before[rows]
            stops[rows] = _first_not_before(self._times[group], *found) + first
        starts = np.maximum(begins, stops - last)
        starts[begins == stops] = stops[begins == stops] = 0
        return starts, stops

    def lists(
        self, item: str, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> pa.DictionaryArray:
        """Return the ids of column ``item`` as one list per range, in layout ``list_dict``."""
        # Ranges with equal ends are equal: the end determines the user, and so the start.
        ends, rows, codes = np.unique(stops, return_index=True, return_inverse=True)
        begins = starts[rows]
        offsets = np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int32)
        groups = np.searchsorted(self._firsts, begins, "right") - 1
        ranges = zip(groups.tolist(), begins.tolist(), ends.tolist(), strict=True)
        items, firsts = self._items[item], self._firsts.tolist()
        slices = [items[n][begin - firsts[n] : end - firsts[n]] for n, begin, end in ranges]
        ids = np.concatenate([np.empty(0, np.int64), *slices])
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32)), list_dict.to_list_dict(lists)
        )

    def num_distinct(self, item: str) -> int:
        """Return the number of distinct ids in an item column."""
        return len(np.unique(np.concatenate([np.unique(ids) for ids in self._items[item]])))

    def check(self) -> tuple[int, int]:
        """Check that the events are sorted. Return the first and last time in microseconds.

        Raises:
            DataError: the events are not sorted by user and time.
        """
        (known, offsets), bounds = self._users, []
        wrong = np.flatnonzero(known[1:] <= known[:-1])
        at = [int(offsets[wrong[0] + 1])] if len(wrong) else []
        for first, times in zip(self._firsts.tolist(), self._times, strict=True):
            falls = np.flatnonzero(times[1:] < times[:-1]) + first + 1
            at += falls[~np.isin(falls, offsets)][:1].tolist()
            bounds += [int(times.min()), int(times.max())]
        if at:
            raise DataError(
                f"{self.path}: row {at[0]} (from 0): the events are not sorted by user and time. "
                f"Write the store again with recd histories build EVENTS {self.path}."
            )
        return min(bounds) * self.note.step, max(bounds) * self.note.step

    @cached_property
    def _table(self) -> parquet.ParquetTable:
        if not self.path.is_file():
            raise DataError(
                f"{self.path}: the file does not exist. Write it with recd histories build EVENTS "
                f"{self.path}."
            )
        return parquet.ParquetTable(self.path)

    @cached_property
    def _users(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Hashes of the users in stored order, and the offsets of their events."""
        users, offsets, at, last = [], [], 0, None
        schema = pa.schema([self._table.schema.field(self.note.user)])
        pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in self._table.units)
        for rows in self._table.read(pieces, schema):
            keys = mixed(rows.data[0].to_numpy())
            is_new = np.concatenate([[keys[0] != last], keys[1:] != keys[:-1]])
            users.append(keys[is_new])
            offsets.append(at + np.flatnonzero(is_new))
            at, last = at + len(rows), keys[-1]
        return np.concatenate(users), np.concatenate([*offsets, [at]])

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Index of the first event of each row group."""
        return np.array([unit.first_row for unit in self._table.units])

    @cached_property
    def _times(self) -> list[NDArray[Any]]:
        return self._mapped(self.note.time)

    @cached_property
    def _items(self) -> dict[str, list[NDArray[Any]]]:
        return {each.name: self._mapped(each.name) for each in self.note.items}

    def _mapped(self, name: str) -> list[NDArray[Any]]:
        """Map a column into memory. Return an array per row group."""
        memory, metadata = np.memmap(self.path, np.uint8, "r"), pq.read_metadata(self.path)
        index = metadata.schema.to_arrow_schema().get_field_index(name)
        dtype = metadata.schema.to_arrow_schema().field(name).type.to_pandas_dtype()
        arrays = []
        for group in range(metadata.num_row_groups):
            chunk, num = metadata.row_group(group).column(index), metadata.row_group(group).num_rows
            header = chunk.total_compressed_size - num * np.dtype(dtype).itemsize
            if chunk.compression != "UNCOMPRESSED" or not 0 < header < _HEADER:
                raise DataError(
                    f"{self.path}: column {name!r} is encoded or compressed, so another program "
                    f"wrote this file. Write it with recd histories build EVENTS {self.path}."
                )
            arrays.append(np.frombuffer(memory, dtype, num, chunk.data_page_offset + header))
        return arrays


@numba.njit(cache=True, nogil=True)
def _first_not_before(times: Any, begins: Any, ends: Any, before: Any) -> Any:
    """Return the index of the first time in each sorted range that is not below ``before``."""
    found = np.empty_like(begins)
    for n in range(len(found)):
        found[n] = begins[n] + np.searchsorted(times[begins[n] : ends[n]], before[n])
    return found

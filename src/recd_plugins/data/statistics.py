"""Duplication statistics of a table, computed in one pass (RecD, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recd_plugins.data.arrow import column_without_nulls, sparse_column
from recd_plugins.data.list_dict import id_features
from recd_plugins.interfaces.data_profile import MAX_SHIFT, FeatureStatistics, TableStatistics
from recd_plugins.interfaces.rows import Origin, Rows, SessionKeys
from recd_plugins.sparse.kernels import address_of
from recd_plugins.sparse.overlap import int32_at, int64_at, next_change, offset_at, overlap

u64 = np.uint64
_MIX = u64(0x9E3779B97F4A7C15)


class StatisticsAccumulator:
    """Accumulates duplication statistics over batches of a table, in stored order.

    ``features`` are names of columns with ids or lists of ids; None selects all id lists.
    """

    def __init__(
        self, schema: pa.Schema, keys: SessionKeys, features: Sequence[str] | None = None
    ) -> None:
        self.features: tuple[str, ...] = tuple(
            id_features(schema) if features is None else features
        )
        self._session = keys.session
        self._rows = self._pairs = 0
        self._counts = np.zeros((len(self.features), 4), np.int64)
        self._ids = np.zeros(len(self.features), np.int64)
        self._last: dict[str, np.ndarray] = {}
        self._last_session: pa.Array | None = None

    def add(self, batch: pa.RecordBatch | Rows) -> np.ndarray:
        """Add the statistics of a batch.

        Returns:
            bool ``[num_features, B]``: whether a feature's list differs from the previous row's,
            which may be in an earlier batch. False for the table's first row.

        Raises:
            DataError: a column is missing or of another type, or has a null.
        """
        if isinstance(batch, Rows):
            rows = batch
        else:
            rows = Rows(batch, (Origin("the table", self._rows, batch.num_rows),))
        num_rows = len(rows)
        changed = np.zeros((len(self.features), num_rows), np.bool_)
        if not num_rows:
            return changed
        continues = self._continues(rows)
        columns = {name: sparse_column(rows, name) for name in self.features}
        _compare(list(columns.values()), continues, self._counts, changed)
        if self._last:
            # Compares the last row of the previous batch with the first row of this batch.
            seam = []
            for name, (values, offsets) in columns.items():
                last, first = self._last[name], values[offsets[0] : offsets[1]]
                ends = np.array([0, len(last), len(last) + len(first)], np.int32)
                seam.append((np.concatenate([last, first]), ends))
            both = np.zeros((len(seam), 2), np.bool_)
            _compare(seam, np.array([False, continues[0]]), self._counts, both)
            changed[:, 0] = both[:, 1]
        ids = [int(offsets[-1] - offsets[0]) for _, offsets in columns.values()]
        self._ids += np.array(ids, np.int64)
        self._last = {
            name: ids[offsets[-2] : offsets[-1]].copy() for name, (ids, offsets) in columns.items()
        }
        self._rows += num_rows
        self._pairs += int(np.count_nonzero(continues))
        return changed

    def result(self) -> TableStatistics:
        """Return the statistics of all added rows."""
        sessions = self._rows - self._pairs
        features = {
            name: FeatureStatistics(self._rows, sessions, int(ids), *map(int, counts))
            for name, ids, counts in zip(self.features, self._ids, self._counts, strict=True)
        }
        return TableStatistics(self._rows, sessions, features)

    def _continues(self, rows: Rows) -> np.ndarray:
        """Return whether each row has the same session as the previous row, bool ``[B]``."""
        sessions = session_column(rows, self._session)
        continues = np.zeros(len(rows), np.bool_)
        same = pc.equal(sessions.slice(1), sessions.slice(0, len(rows) - 1))
        continues[1:] = same.to_numpy(zero_copy_only=False)
        if self._last_session is not None:
            continues[0] = pc.equal(sessions.slice(0, 1), self._last_session)[0].as_py()
        # Copied: a slice would keep the whole column.
        self._last_session = sessions.take(pa.array([len(rows) - 1]))
        return continues


def session_column(rows: Rows, name: str) -> pa.Array:
    """Return the session column of the rows, decoded if it is dictionary-encoded.

    Raises:
        DataError: the column is missing or contains a null.
    """
    column = column_without_nulls(rows, name)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _compare(
    columns: Sequence[tuple[np.ndarray, np.ndarray]],
    continues: np.ndarray,
    counts: np.ndarray,
    changed: np.ndarray,
) -> None:
    addresses = np.array(
        [(address_of(ids), address_of(offsets), offsets.itemsize == 8) for ids, offsets in columns],
        np.int64,
    ).reshape(-1, 3)
    compare_rows(addresses, continues, MAX_SHIFT, counts, changed)


@numba.njit(inline="always")
def _num_common(
    items: Any,
    first: Any,
    first_length: Any,
    second: Any,
    second_length: Any,
    table: Any,
    call: Any,
) -> Any:
    """Return the size of the multiset intersection of two lists of ids."""
    mask = u64(table.shape[1] - 1)
    for index in range(first_length):
        item = items[first + u64(index)]
        slot = (u64(item) * _MIX >> u64(32)) & mask
        while table[2, slot] == call and table[0, slot] != item:
            slot = (slot + u64(1)) & mask
        if table[2, slot] != call:
            table[0, slot], table[1, slot], table[2, slot] = item, 0, call
        table[1, slot] += 1
    shared = 0
    for index in range(second_length):
        item = items[second + u64(index)]
        slot = (u64(item) * _MIX >> u64(32)) & mask
        while table[2, slot] == call and table[0, slot] != item:
            slot = (slot + u64(1)) & mask
        if table[2, slot] == call and table[1, slot] > 0:
            table[1, slot] -= 1
            shared += 1
    return shared


@numba.njit(cache=True, nogil=True)
def compare_rows(columns: Any, continues: Any, max_shift: Any, counts: Any, changed: Any) -> None:
    """Compare each row of each id column with the previous row; set ``changed`` where they differ.

    Adds unchanged rows, unchanged ids, shifted ids and shared ids to ``counts`` ``[columns, 4]``.
    """
    num_rows = u64(len(continues))
    table, call = np.zeros((3, 64), np.int64), 0
    for column in range(len(columns)):
        items = int64_at(columns[column, 0])
        words, offsets, wide = int32_at(columns[column, 0]), columns[column, 1], columns[column, 2]
        changed[column, :] = False
        rows = 0
        ids = new_ids = strange_ids = np.int64(0)
        for index in range(1, num_rows):
            if continues[index]:
                rows += 1
                row = u64(index)
                ids += np.int64(
                    offset_at(offsets, wide, row + u64(1)) - offset_at(offsets, wide, row)
                )
        equal_rows, equal_ids = rows, ids
        row, stop = u64(1), u64(0)
        while True:
            row, stop = next_change(words, u64(1), offsets, wide, row, stop, num_rows)
            if row >= num_rows:
                break
            changed[column, row] = True
            if continues[row]:
                start = offset_at(offsets, wide, row)
                before = offset_at(offsets, wide, row - u64(1))
                length = offset_at(offsets, wide, row + u64(1)) - start
                old_length = start - before
                equal_rows -= 1
                equal_ids -= np.int64(length)
                moved = overlap(words, u64(1), before, old_length, start, length, max_shift)
                kept = u64(0) if moved < 0 else old_length - u64(moved)
                new_ids += np.int64(length - kept)
                while u64(table.shape[1]) < u64(2) * (old_length + u64(1)):
                    table = np.zeros((3, 2 * table.shape[1]), np.int64)
                call += 1
                # Shared ids: the shifted segment, plus common ids of the remaining parts.
                strange_ids += np.int64(length - kept) - _num_common(
                    items, before, old_length - kept, start + kept, length - kept, table, call
                )
            row += u64(1)
        counts[column, 0] += equal_rows
        counts[column, 1] += equal_ids
        counts[column, 2] += ids - new_ids
        counts[column, 3] += ids - strange_ids

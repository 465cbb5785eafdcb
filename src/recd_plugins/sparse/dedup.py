"""Exact deduplication of the rows of jagged numpy columns.

Each row is first compared with the previous row, since data clustered by session repeats rows. Rows
that differ are looked up in a hash table, and matches are compared value by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recd_plugins.sparse import kernels
from recd_plugins.sparse.kernels import address_of

#: Values of 4 or 8 bytes, compared bit by bit, and row offsets, int32 or int64 ``[B + 1]``. The
#: offsets need not start at 0.
JaggedColumn = tuple[NDArray[Any], NDArray[Any]]

_SIZES = (4, 8)
ALL_BITS = 0xFFFFFFFFFFFFFFFF
#: Extra room, since the next batch may have fewer duplicates than the last one.
SPARE = 1.2


@dataclass(frozen=True)
class UniqueRows:
    """Distinct rows of a group of jagged columns, in the order of first occurrence.

    Attributes:
        values: concatenated values of the columns' unique rows, with one array for each run of
            columns of the same dtype.
        lengths: lengths of the U unique rows of each column, int32 ``[num_columns * U]``.
        inverse_lookup: index of the unique row of each row, int64 ``[B]``.
    """

    values: tuple[NDArray[Any], ...]
    lengths: NDArray[np.int32]
    inverse_lookup: NDArray[np.int64]


class Deduplicator:
    """Finds the distinct rows of jagged columns. Thread-safe, and reuses working memory.

    Args:
        neighbours_only: whether to compare rows only with the previous row. If so, a duplicate of
            an earlier row counts as a new row.
    """

    def __init__(self, *, neighbours_only: bool = False) -> None:
        self.neighbours_only = neighbours_only
        self._idle: list[_Room] = []  # each one is used by one call at a time
        self._share = 0.0

    def __call__(
        self, groups: Sequence[Sequence[JaggedColumn]], num_rows: int, hash_mask: int = ALL_BITS
    ) -> list[UniqueRows]:
        """Return the distinct rows of each group; rows are equal if all columns are equal."""
        columns = np.array(
            [describe(column, num_rows) for group in groups for column in group], np.int64
        ).reshape(-1, 4)
        ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
        room = self._room(len(groups), max(map(len, groups), default=0), num_rows)
        total = _count(groups)
        inverse = np.empty((len(ends), num_rows), np.int64)
        num_unique = np.empty(len(ends), np.int64)
        sizes = np.empty(len(columns), np.int64)
        copied = np.empty(len(ends), np.bool_)
        copies = np.empty(int(total * self._share), np.int64)
        kernels.find_unique_rows(
            columns,
            ends,
            self.neighbours_only,
            np.uint64(hash_mask),
            room.column_hashes,
            room.hashes,
            room.table,
            room.first_rows,
            inverse,
            num_unique,
            sizes,
            address_of(copies),
            copies.nbytes,
            copied,
        )
        self._share = min(1.0, SPARE * int(sizes.sum()) / total) if total else 0.0
        unique, targets = _allocate(
            groups, inverse, num_unique.tolist(), sizes.tolist(), copied.tolist(), copies
        )
        kernels.copy_rows(columns, ends, room.first_rows, num_unique, copied, targets)
        self._idle.append(room)
        return unique

    def _room(self, num_groups: int, group_size: int, num_rows: int) -> _Room:
        shape = num_groups, group_size, num_rows
        try:
            room = self._idle.pop()
        except IndexError:
            return _Room(*shape)
        return room if room.shape == shape else _Room(*shape)


class _Room:
    """Working memory for ``kernels.find_unique_rows``."""

    def __init__(self, num_groups: int, group_size: int, num_rows: int) -> None:
        self.shape = num_groups, group_size, num_rows
        self.column_hashes = np.empty((group_size, num_rows), np.uint64)
        self.hashes = np.empty(num_rows, np.uint64)
        self.table = np.empty(1 << max(0, 2 * num_rows - 1).bit_length(), np.int32)
        self.first_rows = np.empty((num_groups, num_rows), np.int32)


def _allocate(
    groups: Sequence[Sequence[JaggedColumn]],
    inverse: NDArray[np.int64],
    num_unique: Sequence[int],
    sizes: Sequence[int],
    copied: Sequence[bool],
    copies: NDArray[np.int64],
) -> tuple[list[UniqueRows], NDArray[np.int64]]:
    """Allocate UniqueRows per group, and return the addresses of their values and lengths."""
    is_copied = [flag for group, flag in zip(groups, copied, strict=True) for _ in group]
    to_copy = sum(size for size, done in zip(sizes, is_copied, strict=True) if not done)
    all_values = np.empty(to_copy, np.int64)
    counts = [len(group) * count for group, count in zip(groups, num_unique, strict=True)]
    all_lengths = np.empty(sum(counts), np.int32)
    length_at = address_of(all_lengths)
    unique, targets = [], []
    size_of = iter(sizes)
    # Words used in ``all_values`` and in ``copies``, and lengths.
    ends = {False: 0, True: 0}
    length = 0
    for group, count, group_count, lookup, done in zip(
        groups, num_unique, counts, inverse, copied, strict=True
    ):
        values, word = [], ends[done]
        for dtype, run in groupby(column[0].dtype for column in group):
            run_sizes = [next(size_of) for _ in run]
            total = sum(run_sizes)
            last_word = word + -(-total * dtype.itemsize // 8)
            array = (copies if done else all_values)[word:last_word]
            values.append(array if dtype == np.int64 else array.view(dtype)[:total])
            value_at = address_of(array)
            for size in run_sizes:
                targets.append((value_at, length_at + length * 4))
                value_at += size * dtype.itemsize
                length += count
            word = last_word
        ends[done] = word
        unique.append(UniqueRows(tuple(values), all_lengths[length - group_count : length], lookup))
    return unique, np.array(targets, np.int64).reshape(-1, 2)


def _count(groups: Sequence[Sequence[JaggedColumn]]) -> int:
    """Return the total number of values, or 0 if a column's values do not have 8 bytes each."""
    columns = [column for group in groups for column in group]
    if any(values.itemsize != 8 for values, _ in columns):
        return 0
    return sum(offsets.item(-1) - offsets.item(0) for _, offsets in columns)


def describe(column: JaggedColumn, num_rows: int) -> tuple[int, bool, int, bool]:
    """Return (address of the values, are they 64-bit, address of the offsets, are they 64-bit)."""
    values, offsets = column
    value_size, offset_size = values.itemsize, offsets.itemsize
    if value_size not in _SIZES or offset_size not in _SIZES or offsets.dtype.kind != "i":
        raise ValueError(
            f"values are {values.dtype} and offsets are {offsets.dtype}, expected values of 4 or 8 "
            "bytes, and int32 or int64 offsets"
        )
    if not (values.flags.c_contiguous and offsets.flags.c_contiguous):
        raise ValueError("values and offsets must be contiguous. Use np.ascontiguousarray")
    if len(offsets) != num_rows + 1:
        raise ValueError(f"got {len(offsets)} offsets for {num_rows} rows, expected {num_rows + 1}")
    if not 0 <= offsets.item(0) <= offsets.item(num_rows) <= len(values):
        raise ValueError(
            f"offsets are {offsets[0]} to {offsets[num_rows]}, but there are {len(values)} values"
        )
    return address_of(values), value_size == 8, address_of(offsets), offset_size == 8

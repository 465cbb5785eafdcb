"""Deduplication of Arrow dictionary columns by dictionary codes, without comparing ids.

The compiled functions receive a column as four numbers: the address of the int32 codes, the address
of the int32 byte offsets of the lists, the number of lists, and the address of the lists' bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from recd_plugins.sparse.dedup import UniqueRows
from recd_plugins.sparse.kernels import address_of
from recd_plugins.sparse.overlap import copy_bytes, int32_at

u64 = np.uint64
_ID_BYTES = 8


class BrokenListError(ValueError):
    """Raised if the size of a dictionary value is not a multiple of 8 bytes, an int64 id.

    Attributes:
        column: index of the column, counted over all groups.
    """

    def __init__(self, column: int) -> None:
        super().__init__(f"column {column}: the size of a list is not a multiple of 8 bytes")
        self.column = column


@dataclass(frozen=True)
class DictionaryColumn:
    """A dictionary-encoded column with the id lists of B rows.

    Attributes:
        codes: index of each row's list in the dictionary, int32 ``[B]``.
        bounds: byte offsets of the lists in ``data``, int32 ``[num_lists + 1]``.
        data: bytes of the lists of int64 ids.
    """

    codes: NDArray[np.int32]
    bounds: NDArray[np.int32]
    data: NDArray[np.uint8]


def unique_lists(groups: Sequence[Sequence[DictionaryColumn]], num_rows: int) -> list[UniqueRows]:
    """Return the distinct rows of each group; rows are equal if all codes are equal.

    Raises:
        BrokenListError: the size of a list is not a multiple of 8 bytes.
    """
    columns = [column for group in groups for column in group]
    described = np.empty((len(columns), 4), np.int64)
    for row, column in zip(described, columns, strict=True):
        row[:2] = address_of(column.codes), address_of(column.bounds)
        row[2:] = column.bounds.size - 1, address_of(column.data)
    ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
    heads = np.empty(max((column.bounds.size for column in columns), default=0), np.int32)
    first_rows = np.empty((len(groups), num_rows + 1), np.int32)
    inverse = np.empty((len(groups), num_rows), np.int64)
    num_unique = np.empty(len(groups), np.int64)
    sizes = np.empty(len(columns), np.int64)
    broken = find_unique_rows(
        described,
        ends,
        heads,
        np.empty(num_rows + 1, np.int32),
        first_rows,
        inverse,
        num_unique,
        sizes,
    )
    if broken >= 0:
        raise BrokenListError(int(broken))
    values = np.empty(int(sizes.sum()), np.int64)
    counts = [len(group) * count for group, count in zip(groups, num_unique.tolist(), strict=True)]
    lengths = np.empty(sum(counts), np.int32)
    copy_rows(described, ends, first_rows, num_unique, address_of(values), lengths)
    value_ends = np.cumsum(sizes)[ends - 1].tolist()
    length_ends = accumulate(counts)
    return [
        UniqueRows(
            (values[first_value:last_value],), lengths[last_length - count : last_length], rows
        )
        for first_value, last_value, last_length, count, rows in zip(
            [0, *value_ends], value_ends, length_ends, counts, inverse, strict=False
        )
    ]


@numba.njit(inline="always")
def _number_codes(codes: Any, heads: Any, runs: Any, first_rows: Any, inverse: Any) -> Any:
    """Number the codes of one column in order of first occurrence; return the distinct count.

    In a run of equal codes, only the first is looked up. The loops avoid unpredictable branches.
    """
    num_rows = len(inverse)
    if num_rows == 0:
        return 0
    num_runs, runs[0] = 1, 0
    for row in range(1, num_rows):
        runs[num_runs] = row
        num_runs += codes[row] != codes[row - 1]
    count = np.int64(0)
    for run in range(num_runs):
        row = runs[run]
        code = u64(codes[row])
        known = np.int64(heads[code])
        is_new = known < 0
        number = count if is_new else known
        heads[code] = number
        first_rows[count] = row
        runs[run] = number
        count += is_new
    run = 0
    inverse[0] = runs[0]
    for row in range(1, num_rows):
        run += codes[row] != codes[row - 1]
        inverse[row] = runs[run]
    return count


@numba.njit(inline="always")
def _follows(codes: Any, first_rows: Any, inverse: Any) -> Any:
    """Return whether rows with the same number in ``inverse`` also have the same code."""
    differ = np.int32(0)
    for row in range(len(inverse)):
        differ |= codes[row] ^ codes[first_rows[u64(inverse[row])]]
    return differ == 0


@numba.njit(inline="always")
def _same_codes(columns: Any, begin: Any, end: Any, left: Any, right: Any) -> Any:
    for column in range(begin, end):
        codes = int32_at(columns[column, 0])
        if codes[left] != codes[right]:
            return False
    return True


@numba.njit(inline="always")
def _number_rows(
    columns: Any,
    begin: Any,
    end: Any,
    key: Any,
    heads: Any,
    nexts: Any,
    first_rows: Any,
    inverse: Any,
) -> Any:
    """Number the distinct rows of several columns by their codes; return how many there are."""
    codes = int32_at(columns[key, 0])
    count, last = 0, 0
    for row in range(len(inverse)):
        if row == 0 or not _same_codes(columns, begin, end, row, row - 1):
            code = codes[row]
            last = heads[code]
            while last >= 0 and not _same_codes(columns, begin, end, row, first_rows[last]):
                last = nexts[last]
            if last < 0:
                last = count
                nexts[last] = heads[code]
                heads[code] = last
                first_rows[last] = row
                count += 1
        inverse[row] = last
    return count


@numba.njit(cache=True, nogil=True)
def find_unique_rows(
    columns: Any,
    group_ends: Any,
    heads: Any,
    scratch: Any,
    first_rows: Any,
    inverse: Any,
    num_unique: Any,
    sizes: Any,
) -> Any:
    """Find the distinct rows of each group of columns, in the order of first occurrence.

    Args:
        columns: int64 ``[num_columns, 4]``, as described at the top of this file.
        group_ends: int64 ``[num_groups]``, end of each group's columns (exclusive).
        heads: int32 scratch memory, ``[largest number of lists in a dictionary]``.
        scratch: int32 scratch memory, ``[B + 1]``.
        first_rows: output, int32 ``[num_groups, B + 1]``, first occurrence of each distinct row.
        inverse: output, int64 ``[num_groups, B]``, distinct row of each row.
        num_unique: output, int64 ``[num_groups]``, number of distinct rows.
        sizes: output, int64 ``[num_columns]``, number of ids in the distinct rows.

    Returns:
        The column of a list whose size is not a multiple of 8 bytes, or -1.
    """
    begin = 0
    for group in range(len(group_ends)):
        end = group_ends[group]
        # The column with most lists distinguishes most rows.
        key = begin
        for column in range(begin, end):
            if columns[column, 2] > columns[key, 2]:
                key = column
        heads[: columns[key, 2]] = -1
        codes = int32_at(columns[key, 0])
        count = _number_codes(codes, heads, scratch, first_rows[group], inverse[group])
        for column in range(begin, end):
            codes = int32_at(columns[column, 0])
            if column != key and not _follows(codes, first_rows[group], inverse[group]):
                heads[: columns[key, 2]] = -1
                count = _number_rows(
                    columns, begin, end, key, heads, scratch, first_rows[group], inverse[group]
                )
                break
        num_unique[group] = count
        for column in range(begin, end):
            codes, bounds = int32_at(columns[column, 0]), int32_at(columns[column, 1])
            total = np.int64(0)
            for unique in range(count):
                code = codes[first_rows[group, unique]]
                size = bounds[code + 1] - bounds[code]
                if size % _ID_BYTES:
                    return column
                total += size // _ID_BYTES
            sizes[column] = total
        begin = end
    return -1


@numba.njit(cache=True, nogil=True)
def copy_rows(
    columns: Any, group_ends: Any, first_rows: Any, num_unique: Any, values: Any, lengths: Any
) -> None:
    """Copy the distinct rows of each column to address ``values``, and lengths to ``lengths``.

    The other arguments are arguments and outputs of ``find_unique_rows``.
    """
    begin, out = 0, 0
    for group in range(len(group_ends)):
        count = num_unique[group]
        for column in range(begin, group_ends[group]):
            codes, bounds = int32_at(columns[column, 0]), int32_at(columns[column, 1])
            data = columns[column, 3]
            unique = 0
            while unique < count:
                first = last = np.int64(codes[first_rows[group, unique]])
                while unique < count and codes[first_rows[group, unique]] == last:
                    lengths[out] = (bounds[last + 1] - bounds[last]) // _ID_BYTES
                    last += 1
                    unique += 1
                    out += 1
                size = np.int64(bounds[last] - bounds[first])
                copy_bytes(values, data + bounds[first], size)
                values += size
        begin = group_ends[group]

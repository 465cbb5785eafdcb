"""Jagged columns as storage has them, a dictionary of lists and codes, to rows without duplicates.

Rows with one code are equal, so codes are deduplicated in place of ids, and no id is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from recd_plugins.sparse import dictionary_kernels as kernels
from recd_plugins.sparse.dedup import address_of


class BrokenListError(ValueError):
    """A column has a list whose bytes are no whole number of ids.

    Attributes:
        column: its number, counted over all groups.
    """

    def __init__(self, column: int) -> None:
        super().__init__(f"column {column} has a list that is no whole number of ids")
        self.column = column


@dataclass(frozen=True)
class DictionaryColumn:
    """A feature of B rows.

    Attributes:
        codes: which list each row has, int32 ``[B]``.
        bounds: bytes at which each list starts and ends, int32 ``[num_lists + 1]``.
        data: the lists, int64 ids one after the other, as bytes.
    """

    codes: NDArray[np.int32]
    bounds: NDArray[np.int32]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class UniqueLists:
    """The distinct rows of a group of columns, in the order in which they occur.

    Rows that differ in their codes stay apart, even where a dictionary has a list twice.

    Attributes:
        values: ids, one column after the other.
        lengths: of the unique rows, column by column, int32 ``[num_columns * U]``.
        inverse_lookup: the unique row of each row, int64 ``[B]``.
    """

    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    inverse_lookup: NDArray[np.int64]


def unique_lists(groups: Sequence[Sequence[DictionaryColumn]], num_rows: int) -> list[UniqueLists]:
    """The unique rows of each group of a batch: rows merge that have the same codes in all columns.

    Raises:
        BrokenListError: a list whose bytes are no whole number of ids.
    """
    columns = [column for group in groups for column in group]
    described = np.array([_describe(column) for column in columns], np.int64).reshape(-1, 4)
    ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
    heads = np.empty(max((column.bounds.size for column in columns), default=0), np.int32)
    first_rows = np.empty((len(groups), num_rows + 1), np.int32)
    inverse = np.empty((len(groups), num_rows), np.int64)
    num_unique = np.empty(len(groups), np.int64)
    sizes = np.empty(len(columns), np.int64)
    broken = kernels.find_unique_rows(
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
    kernels.copy_rows(described, ends, first_rows, num_unique, address_of(values), lengths)
    value_ends = np.cumsum(sizes)[ends - 1].tolist()
    length_ends = accumulate(counts)
    return [
        UniqueLists(
            values[first_value:last_value], lengths[last_length - count : last_length], rows
        )
        for first_value, last_value, last_length, count, rows in zip(
            [0, *value_ends], value_ends, length_ends, counts, inverse, strict=False
        )
    ]


def _describe(column: DictionaryColumn) -> tuple[int, int, int, int]:
    return (
        address_of(column.codes),
        address_of(column.bounds),
        column.bounds.size - 1,
        address_of(column.data),
    )

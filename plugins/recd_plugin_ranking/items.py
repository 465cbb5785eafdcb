"""Items of a dataset: the id of each row, and those that the training split has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import (
    DataError,
    Dataset,
    DatasetWrapper,
    Rows,
    RowTable,
    rows_of_split,
    sparse_column,
)

Int64s = NDArray[np.int64]
T = TypeVar("T")

# A dataset is wrapped anew by all who read it.
_kept: WeakKeyDictionary[Dataset, dict[Hashable, Any]] = WeakKeyDictionary()


def kept(dataset: Dataset, key: Hashable, make: Callable[[], T]) -> T:
    """What was made of a dataset, whatever is wrapped around it, once in a process."""
    while isinstance(dataset, DatasetWrapper):
        dataset = dataset.inner
    known = _kept.setdefault(dataset, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


def lists_of(rows: Rows, feature: str) -> tuple[Int64s, Int64s]:
    """Ids of a sparse feature and how many each row has."""
    ids, offsets = sparse_column(rows, feature)
    return ids[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int64)


def item_of_rows(rows: Rows, feature: str) -> Int64s:
    """The one id of each row, ``[num_rows]``.

    Raises:
        DataError: a row has none or several; says which.
    """
    ids, lengths = lists_of(rows, feature)
    if len(wrong := np.flatnonzero(lengths != 1)):
        place = rows.place_of(int(wrong[0]))
        raise DataError(
            f"{place} has {lengths[wrong[0]]} ids in {feature}, which is to name its item: one a "
            "row. Name another feature, or leave such rows out"
        )
    return ids


def is_positive(rows: Rows, label: str) -> NDArray[np.bool_]:
    """Which rows have a label above one half, ``[num_rows]``.

    Raises:
        DataError: a row has none; says which.
    """
    labels = rows.data.column(label)
    if (empty := labels.is_null(nan_is_null=True).index(True).as_py()) >= 0:
        raise DataError(
            f"{rows.place_of(empty)} has no {label}, so nothing says whether it is positive; write "
            "0 or 1, or leave such rows out"
        )
    found: NDArray[np.bool_] = labels.to_numpy(zero_copy_only=False) > 0.5
    return found


@dataclass(frozen=True)
class Items:
    """The items of a training split.

    Attributes:
        ids: int64 ``[C]``, ascending.
        counts: rows of each, int64 ``[C]``.
        rows: of each the first row in stored order, ``columns`` of it.
    """

    ids: Int64s
    counts: Int64s
    rows: RowTable
    columns: tuple[str, ...]

    @classmethod
    def of(cls, dataset: Dataset, item: str, columns: Sequence[str]) -> Items:
        """Read the training split once."""
        ids, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        parts: list[Rows] = []
        found: list[Int64s] = []
        for rows in rows_of_split(dataset, "train"):
            unique, first, number = np.unique(
                item_of_rows(rows, item), return_index=True, return_counts=True
            )
            new = ~np.isin(unique, ids)
            if new.any():
                found.append(unique[new])
                part = Rows(rows.data.select(list(columns)), rows.origins)
                parts.append(RowTable([part]).take(first[new], {}))
            merged, inverse = np.unique(np.concatenate([ids, unique]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, number])).astype(np.int64)
            ids = merged
        order = np.argsort(np.concatenate(found))
        table = RowTable([RowTable(parts).take(order, {})])
        return cls(ids, counts, table, tuple(columns))

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, ids: Int64s) -> Int64s:
        """Where ids stand in ``ids``; -1 for others."""
        place = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[place] == ids, place, -1)

"""Item ids of dataset rows, the items of the training split, and random numbers per row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import Any, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import DataError, Dataset, DatasetWrapper, Rows, arrow, row_tables

Int64s = NDArray[np.int64]
T = TypeVar("T")

# Every reader wraps the dataset in a new object.
_kept: WeakKeyDictionary[Dataset, dict[Hashable, Any]] = WeakKeyDictionary()


def kept(dataset: Dataset, key: Hashable, make: Callable[[], T]) -> T:
    """Return the cached value of ``key`` for a dataset, or create it with ``make``."""
    while isinstance(dataset, DatasetWrapper):
        dataset = dataset.inner
    known = _kept.setdefault(dataset, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


def lists_of(rows: Rows, feature: str) -> tuple[Int64s, Int64s]:
    """Return a sparse feature's ids ``[num_ids]`` and list lengths ``[num_rows]``, both int64."""
    ids, offsets = arrow.sparse_column(rows, feature)
    return ids[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int64)


def item_of_rows(rows: Rows, feature: str) -> Int64s:
    """Return the item id of each row, int64 ``[num_rows]``. Every row must have one id."""
    ids, lengths = lists_of(rows, feature)
    if len(wrong := np.flatnonzero(lengths != 1)):
        place = rows.place_of(int(wrong[0]))
        raise DataError(
            f"{place}: item feature {feature!r} has {lengths[wrong[0]]} ids. Use a feature with "
            "one id per row."
        )
    return ids


def is_positive(rows: Rows, label: str) -> NDArray[np.bool_]:
    """Return a mask of the rows with a label above 0.5, bool ``[num_rows]``."""
    labels = rows.data.column(label)
    if (empty := labels.is_null(nan_is_null=True).index(True).as_py()) >= 0:
        raise DataError(
            f"{rows.place_of(empty)}: label {label!r} is missing. Write 0 or 1, or remove the row."
        )
    found: NDArray[np.bool_] = labels.to_numpy(zero_copy_only=False) > 0.5
    return found


@dataclass(frozen=True)
class Items:
    """Items of a training split: ids (ascending) and row counts, int64 ``[C]``.

    ``rows`` has the first row of each item, with the given ``columns``.
    """

    ids: Int64s
    counts: Int64s
    rows: row_tables.RowTable
    columns: tuple[str, ...]

    @classmethod
    def of(cls, dataset: Dataset, item: str, columns: Sequence[str]) -> Items:
        """Read the training split and collect its items."""
        ids, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        parts: list[Rows] = []
        found: list[Int64s] = []
        for rows in row_tables.rows_of_split(dataset, "train"):
            unique, first, number = np.unique(
                item_of_rows(rows, item), return_index=True, return_counts=True
            )
            new = ~np.isin(unique, ids)
            if new.any():
                found.append(unique[new])
                part = Rows(rows.data.select(list(columns)), rows.origins)
                parts.append(row_tables.RowTable([part]).take(first[new]))
            merged, inverse = np.unique(np.concatenate([ids, unique]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, number])).astype(np.int64)
            ids = merged
        order = np.argsort(np.concatenate(found))
        table = row_tables.RowTable([row_tables.RowTable(parts).take(order)])
        return cls(ids, counts, table, tuple(columns))

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, ids: Int64s) -> Int64s:
        """Return the index of each id in ``self.ids``, or -1 for unknown ids."""
        place = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[place] == ids, place, -1)


Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(rows: Rows, seed: int, epoch: int) -> Keys:
    """Return a hash of each row's file, row number, seed and epoch, uint64 ``[num_rows]``."""
    numbers = [
        np.arange(origin.first_row, origin.first_row + origin.num_rows)
        if origin.rows is None
        else origin.rows.to_numpy()
        for origin in rows.origins
    ]
    files = [crc32(_name(origin.path).encode()) for origin in rows.origins]
    counts = [origin.num_rows for origin in rows.origins]
    keys = _mixed(np.concatenate(numbers).astype(np.uint64))
    keys = _mixed(keys ^ np.repeat(np.array(files, np.uint64), counts))
    of_epoch = _mixed(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64)
    return _mixed(keys ^ _mixed(of_epoch))


def unit_floats(keys: Keys, number: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return element ``number`` of each key's sequence of random numbers in [0, 1)."""
    mixed = _mixed(keys + _GOLDEN * (number.astype(np.uint64) + np.uint64(1)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _name(path: str) -> str:
    """Return the file name with its Hive partition folders, independent of the table's location."""
    name, *folders = reversed(PurePath(path).parts)
    partition = takewhile(lambda folder: "=" in folder, folders)
    return "/".join([name, *partition])


def _mixed(values: Keys) -> Keys:
    """Apply the SplitMix64 finalizer."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

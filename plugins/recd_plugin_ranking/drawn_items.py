"""Negatives that are drawn among all items."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_ranking.draws import row_keys, unit_floats
from recd_plugin_ranking.items import Int64s, Items, is_positive, item_of_rows, lists_of
from recd_plugins.api import DataError, Rows, RowTable

# What is still not allowed after so many draws is drawn among what is allowed.
_ATTEMPTS = 16


class DrawnItems:
    """A row, then copies of it with other items.

    Args:
        items: to draw from, with the columns of the item.
        item: feature of the item.
        label: column of the label.
        negatives: copies of a row.
        weights: of each item, ``[C]``.
        never: features whose items are not drawn for a row.
        seed: of the draws.
    """

    def __init__(
        self,
        items: Items,
        item: str,
        label: str,
        *,
        negatives: int,
        weights: NDArray[np.float64],
        never: Sequence[str],
        seed: int,
    ) -> None:
        self._items, self._item, self._label = items, item, label
        self._negatives, self._never, self._seed = negatives, never, seed
        self._weights = weights
        self._until = np.cumsum(weights) / weights.sum()

    def __call__(self, rows: Rows, epoch: int) -> Rows:
        """``rows`` with their negatives."""
        self._check_positive(rows)
        drawn = self._drawn(rows, epoch)
        num_rows, copies = len(rows), self._negatives
        columns = list(self._items.columns)
        own = Rows(rows.data.select(columns), rows.origins)
        others = self._items.rows.take(drawn.ravel(), {})
        order = np.arange(num_rows)[:, None], num_rows + np.arange(drawn.size).reshape(drawn.shape)
        mixed = RowTable([own, others]).take(np.concatenate(order, 1).ravel(), {})
        whole = RowTable([rows]).take(np.repeat(np.arange(num_rows), copies + 1), rows.groups)
        labels = np.arange(len(whole)) % (copies + 1) == 0
        replaced = {name: mixed.data.column(name) for name in columns}
        replaced[self._label] = pa.array(labels.astype(np.int8)).cast(
            whole.data.schema.field(self._label).type
        )
        # Fields say how lists are stored.
        fields = [
            (mixed if field.name in columns else whole).data.schema.field(field.name)
            for field in whole.data.schema
        ]
        arrays = [replaced.get(field.name, whole.data.column(field.name)) for field in fields]
        data = pa.record_batch(arrays, schema=pa.schema(fields))
        groups = {name: number * (copies + 1) for name, number in rows.groups.items()}
        return Rows(data, whole.origins, groups)

    def _drawn(self, rows: Rows, epoch: int) -> Int64s:
        """Places of items, ``[num_rows, negatives]``."""
        keys = row_keys(rows, self._seed, epoch)
        forbidden = self._forbidden(rows)
        row, number = np.divmod(np.arange(len(rows) * self._negatives), self._negatives)
        drawn = np.zeros(len(row), np.int64)
        left = np.arange(len(row))
        for attempt in range(_ATTEMPTS):
            floats = unit_floats(keys[row[left]], attempt * self._negatives + number[left])
            drawn[left] = np.searchsorted(self._until, floats, "right")
            left = left[_among(forbidden, row[left] * len(self._items) + drawn[left])]
        for each in left.tolist():
            drawn[each] = self._allowed(rows, forbidden, int(row[each]), keys, int(number[each]))
        return drawn.reshape(len(rows), self._negatives)

    def _allowed(
        self, rows: Rows, forbidden: Int64s, row: int, keys: NDArray[np.uint64], number: int
    ) -> int:
        """One draw among the items that the row may have."""
        size = len(self._items)
        mine = forbidden[(forbidden >= row * size) & (forbidden < (row + 1) * size)] - row * size
        weights = self._weights.copy()
        weights[mine] = 0
        if not weights.any():
            raise DataError(
                f"{rows.place_of(row)} names all {size} items of the training split, so that there "
                "is no negative to draw; take features out of never, or leave such rows out"
            )
        at = number + _ATTEMPTS * self._negatives
        drawn = unit_floats(keys[row : row + 1], np.array([at]))[0] * weights.sum()
        return int(np.searchsorted(np.cumsum(weights), drawn, "right"))

    def _forbidden(self, rows: Rows) -> Int64s:
        """Row times items plus the item's place, ascending, of what may not be drawn."""
        own = item_of_rows(rows, self._item), np.ones(len(rows), np.int64)
        pairs = []
        for ids, lengths in (own, *(lists_of(rows, name) for name in self._never)):
            places = self._items.places(ids)
            row = np.repeat(np.arange(len(rows)), lengths)
            pairs.append((row * len(self._items) + places)[places >= 0])
        return np.unique(np.concatenate(pairs))

    def _check_positive(self, rows: Rows) -> None:
        if len(wrong := np.flatnonzero(~is_positive(rows, self._label))):
            row = int(wrong[0])
            label = rows.data.column(self._label)[row].as_py()
            raise DataError(
                f"{rows.place_of(row)} has the label {label}, and negatives are drawn for positive "
                "rows: leave the others out by the dataset's options, or set by: in_request, which "
                "draws among them"
            )


def _among(ascending: Int64s, values: Int64s) -> NDArray[np.bool_]:
    place = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[place] == values
    return found

"""Candidates as rows: each element of some lists, with the rest of its row beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_tables.leaves import Leaf, leaf_array, list_parts
from recd_plugin_tables.values.cells import Cells
from recd_plugins.api import DataError, Rows


class Exploded:
    """Rows of a table, and of each some rows for a model.

    What is not exploded is made once a row of the table, and spread.

    Attributes:
        parents: the row of the table that each row is of, int64 ``[num_rows]``, from 0.
        numbers: which candidate of it, from 0.
        num_empty: rows of the table without candidates.
    """

    def __init__(
        self,
        rows: Rows,
        parents: NDArray[np.int64],
        numbers: NDArray[np.int64],
        items: dict[str, pa.Array],
        num_empty: int,
    ) -> None:
        self._rows, self._items = rows, items
        self.parents, self.numbers, self.num_empty = parents, numbers, num_empty

    def __len__(self) -> int:
        return len(self.parents)

    def column(self, leaf: Leaf) -> pa.Array:
        """The column of a leaf: of the table's rows, or of candidates where it is exploded."""
        return self._items[leaf.path[0]] if leaf.exploded else self._rows.data[leaf.path[0]]

    def cells(self, leaf: Leaf) -> Cells:
        """The values of a leaf in that column."""

        def place(index: int) -> str:
            return self.place(index, leaf.name, of_candidates=leaf.exploded)

        return Cells(leaf_array(self.column(leaf), leaf), place)

    def place(self, index: int, column: str, *, of_candidates: bool = True) -> str:
        """File, row and column for an error message, and the candidate where there are some."""
        row = int(self.parents[index]) if of_candidates else index
        path, row_in_file = self._rows.origin_of(row)
        candidate = f", candidate {self.numbers[index]}" if of_candidates and self._items else ""
        return f"{path}: row {row_in_file} (from 0){candidate}, column {column!r}"

    def spread(self, values: NDArray[Any], leaf: Leaf) -> NDArray[Any]:
        """Values of a leaf's column for each row."""
        return values if leaf.exploded or not self._items else values[self.parents]

    def spread_array(self, values: pa.Array, leaf: Leaf) -> pa.Array:
        """The same of Arrow."""
        return values if leaf.exploded or not self._items else values.take(pa.array(self.parents))


def explode(rows: Rows, columns: Sequence[str]) -> Exploded:
    """A row for each element of the lists in ``columns``, which are parallel; none: the rows.

    Raises:
        DataError: lists of one row differ in length.
    """
    num_rows = len(rows)
    if not columns:
        return Exploded(rows, np.arange(num_rows), np.zeros(num_rows, np.int64), {}, 0)
    items, lengths = {}, None
    for name in columns:
        offsets, items[name], _ = list_parts(rows.data[name])
        found = np.diff(offsets)
        lengths = found if lengths is None else lengths
        if (found != lengths).any():
            row = int((found != lengths).argmax())
            path, row_in_file = rows.origin_of(row)
            raise DataError(
                f"{path}: row {row_in_file} (from 0): {found[row]} elements in column {name} and "
                f"{lengths[row]} in {columns[0]}; columns that are exploded together are parallel"
            )
    assert lengths is not None
    parents = np.repeat(np.arange(num_rows), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    numbers = np.arange(len(parents)) - starts[parents] if len(parents) else parents
    return Exploded(rows, parents, numbers.astype(np.int64), items, int((lengths == 0).sum()))

"""``RequestRows``: the runs of adjacent batch rows that have the same user side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recd_plugins.sparse.index_select import index_select
from recd_plugins.sparse.movable import Movable


@dataclass(frozen=True)
class RequestRows(Movable):
    """U request rows: runs of adjacent rows of a batch whose user features are all equal.

    A request usually is one request row. A request whose rows are not adjacent has several.

    Attributes:
        inverse: the request row of each batch row, int64 ``[B]``, in ascending order.
        first_rows: the first batch row of each request row, int64 ``[U]``.
        features: sparse user features, which are equal in all batch rows of a request row.
        dense_columns: columns of ``dense_features`` that are equal in all batch rows of a request
            row.
    """

    TENSORS = ("inverse", "first_rows")

    inverse: Tensor
    first_rows: Tensor
    features: tuple[str, ...]
    dense_columns: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Return U, the number of request rows."""
        return self.first_rows.shape[0]

    def select(self, rows: Tensor) -> Tensor:
        """Return the first batch row of each request row: ``[B, ...]`` to ``[U, ...]``."""
        return index_select(rows, self.first_rows)

    def expand(self, rows: Tensor) -> Tensor:
        """Repeat each request row for its batch rows: ``[U, ...]`` to ``[B, ...]``."""
        return index_select(rows, self.inverse)

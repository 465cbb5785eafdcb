"""``RequestRows``: the runs of adjacent batch rows that have the same user side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torchrec.streamable import Pipelineable

from recd_plugins.sparse.index_select import index_select


@dataclass(frozen=True)
class RequestRows(Pipelineable):
    """U request rows: runs of adjacent rows of a batch whose user features are all equal.

    A request usually is one request row. A request whose rows are not adjacent has several.

    Attributes:
        inverse: the request row of each batch row, int64 ``[B]``, in ascending order.
        first_rows: the first batch row of each request row, int64 ``[U]``.
        features: sparse user features, which are equal in all batch rows of a request row.
        dense_columns: columns of ``dense_features`` that are equal in all batch rows of a request
            row.
    """

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

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return replace(
            self,
            inverse=self.inverse.to(device, non_blocking=non_blocking),
            first_rows=self.first_rows.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(
            self, inverse=self.inverse.pin_memory(), first_rows=self.first_rows.pin_memory()
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.inverse.record_stream(stream)
        self.first_rows.record_stream(stream)

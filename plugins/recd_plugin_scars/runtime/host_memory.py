"""Rows in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from recd_plugin_scars.runtime.backing_store import BackingStore
from recd_plugins.api import SetupError


class MemoryStore(BackingStore):
    """Rows in host memory. It is not locked: a device copies what the mover has gathered of it.

    Arguments and errors are those of ``open_backing_store``.
    """

    def __init__(self, *, name: str, num_rows: int, dim: int, with_state: bool) -> None:
        self.name = name
        try:
            self.weights = torch.zeros(num_rows, dim)
            self.state = torch.zeros(num_rows) if with_state else None
        except RuntimeError as error:
            needed = 4 * num_rows * (dim + with_state)
            raise SetupError(
                f"{name}: {num_rows:,} rows of {dim} values need {needed:,} bytes of memory, which "
                f"there are not ({error}); keep the table in a file"
            ) from error
        # The kernel may make parameters of them; what is copied here is none of autograd's.
        self._weights = self.weights.detach()

    def read(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        torch.index_select(self._weights, 0, rows, out=weights)
        if self.state is not None and state is not None:
            torch.index_select(self.state, 0, rows, out=state)

    def write(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        self._weights.index_copy_(0, rows, weights)
        if self.state is not None and state is not None:
            self.state.index_copy_(0, rows, state)

"""Where all rows of the cached tables of a kernel are, beyond the few in its fast memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

#: Rows that ``BackingStore.fill`` gives at a time take about so much.
FILL_BYTES = 1 << 26


class BackingStore(ABC):
    """All rows of the tables of a kernel, below each other, with their optimizer state.

    ``read`` and ``write`` are for one thread at a time (a ``RowMover``'s) and release the GIL for
    most of their work. What ``write`` wrote is seen in ``weights`` and ``state`` at once, and what
    was written to these is seen by ``read``.

    Attributes:
        name: of the store, for messages.
        weights: float32 ``[num_rows, dim]``, contiguous, on the CPU. In place writable.
        state: of the optimizer, float32 ``[num_rows]``; None without one.
        is_kept: the rows are those of an earlier run: not to be initialised.
    """

    name: str
    weights: Tensor
    state: Tensor | None
    is_kept: bool = False

    @abstractmethod
    def read(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy rows out.

        Args:
            rows: int64 ``[n]``, in any order, less than ``num_rows``.
            weights: float32 ``[n, dim]``, contiguous, to be overwritten.
            state: float32 ``[n]``, likewise; None without optimizer state.

        Raises:
            RecdError: rows cannot be read; names the file and the rows.
        """

    @abstractmethod
    def write(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy rows in; as ``read``, but that no row may occur twice."""

    def fill(self, initialise: Callable[[Tensor], object]) -> None:
        """Give the weights their first values, some rows after others.

        Args:
            initialise: fills float32 ``[n, dim]`` in place, such as
                ``lambda rows: rows.uniform_(-0.1, 0.1)``. Called for rows from the first to the
                last, so that a generator gives what it would give for all at once.
        """
        num_rows = max(FILL_BYTES // (4 * self.weights.shape[1]), 1)
        weights = self.weights.detach()
        for first in range(0, len(weights), num_rows):
            initialise(weights[first : first + num_rows])

    def lend(self) -> None:  # noqa: B027
        """Told before somebody may write to ``weights`` and ``state``."""

    def flush(self) -> None:  # noqa: B027 (memory has nothing to flush)
        """Return when all that was written is where a crash of the machine leaves it."""

    def close(self) -> None:  # noqa: B027
        """Give up what is held outside memory; ``weights`` and ``state`` are not to be used then.

        Calling it again does nothing.
        """

"""Where all rows of the cached tables of a kernel are, beyond the few in its fast memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from recd_plugin_scars.runtime.spec import HostMemory, MappedFile

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

    def flush(self) -> None:  # noqa: B027 (memory has nothing to flush)
        """Return when all that was written is where a crash of the machine leaves it."""

    def close(self) -> None:  # noqa: B027
        """Give up what is held outside memory; ``weights`` and ``state`` are not to be used then.

        Calling it again does nothing.
        """


def open_backing_store(
    storage: HostMemory | MappedFile,
    *,
    name: str,
    num_rows: int,
    dim: int,
    with_state: bool,
    pin: bool,
    shards: Sequence[str] = (),
) -> BackingStore:
    """Make the backing store of a kernel, or open the one that an earlier run kept.

    Args:
        storage: in memory, or in files.
        name: of the store; no other kernel and no other rank may have the same.
        num_rows: of all tables of the kernel, as far as this rank holds them.
        dim: values of a row.
        with_state: each row has an optimizer state of one float32.
        pin: lock host memory, for copies to a CUDA device.
        shards: what the rows are of, in order, in words; kept files have to be of the same.

    Returns:
        Weights and state are zero unless ``is_kept``.

    Raises:
        SetupError: there is not enough memory or disk (how much is missing is said), or the files
            are in use.
        DataError: files that an earlier run kept are not those of this table, or incomplete.
    """
    if isinstance(storage, MappedFile):
        from recd_plugin_scars.runtime.mapped_file import FileStore

        return FileStore(
            storage.folder,
            keep=storage.keep,
            name=name,
            num_rows=num_rows,
            dim=dim,
            with_state=with_state,
            shards=shards,
        )
    from recd_plugin_scars.runtime.host_memory import MemoryStore

    return MemoryStore(name=name, num_rows=num_rows, dim=dim, with_state=with_state, pin=pin)

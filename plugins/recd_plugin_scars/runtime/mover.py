"""Moves rows between a backing store and fast memory in a thread, while the step goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from recd_plugin_scars.runtime.stores import BackingStore
from recd_plugins.api import RecdError

Result = TypeVar("Result")


class Pending:
    """Rows that are being read."""

    def __init__(self, rows: Future[tuple[Tensor, Tensor | None]]) -> None:
        self._rows = rows

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Return weights, float32 ``[n, dim]``, and state, float32 ``[n]`` or None.

        Raises:
            RecdError: this read, or a move queued before it, failed.
        """
        return self._rows.result()


class RowMover:
    """Reads and writes rows of one backing store in one thread, first in, first out.

    A read sees every write queued before it. Each kernel has a mover of its own, so that none waits
    for another. After an error nothing moves any more, and each further call raises it.

    Args:
        store: used by nobody else between ``read`` or ``write`` and ``drain``.
        pin: whether buffers are pinned, for copies to and from a CUDA device.
    """

    def __init__(self, store: BackingStore, *, pin: bool = False) -> None:
        self.store = store
        self._pin = pin
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rows of {store.name}")
        self._error: RecdError | None = None
        self._is_error_raised = False
        self._is_closed = False

    def buffers(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Return memory for rows to ``write``: ``[num_rows, dim]``, and ``[num_rows]`` or None."""
        weights = torch.empty(num_rows, self.store.weights.shape[1], pin_memory=self._pin)
        if self.store.state is None:
            return weights, None
        return weights, torch.empty(num_rows, pin_memory=self._pin)

    def read(self, rows: Tensor) -> Pending:
        """Start to read rows.

        Args:
            rows: int64 ``[n]`` on the CPU, in any order; must not change any more.

        Raises:
            RecdError: an earlier move failed.
        """

        def read() -> tuple[Tensor, Tensor | None]:
            weights, state = self.buffers(len(rows))
            self.store.read(rows, weights, state)
            return weights, state

        return Pending(self._submit(read))

    def write(
        self,
        rows: Tensor,
        weights: Tensor,
        state: Tensor | None,
        *,
        ready: torch.cuda.Event | None = None,
    ) -> None:
        """Start to write rows, which belong to the mover from now on.

        Args:
            rows: int64 ``[n]`` on the CPU, no row twice.
            weights: float32 ``[n, dim]`` on the CPU, contiguous.
            state: float32 ``[n]``; None without optimizer state.
            ready: awaited by the thread, such as the end of a copy from a device.

        Raises:
            RecdError: an earlier move failed.
        """

        def write() -> None:
            if ready is not None:
                ready.synchronize()
            self.store.write(rows, weights, state)

        self._submit(write)

    def drain(self) -> None:
        """Return when all queued moves are done.

        Raises:
            RecdError: one of them failed.
        """
        self._submit(lambda: None).result()

    def close(self) -> None:
        """Finish the queued moves and end the thread. A second call does nothing.

        Raises:
            RecdError: a move failed, and no call has raised that yet.
        """
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        self._thread.shutdown()
        if self._error is not None and not self._is_error_raised:
            raise self._error

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._process != os.getpid():
            raise RecdError(
                f"{self.store.name}: a forked process lacks the thread of process "
                f"{self._process} that moves rows; start processes by spawn, or shard after the "
                "fork"
            )
        if self._error is not None:
            self._is_error_raised = True
            raise self._error
        return self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        if self._error is None:
            try:
                return work()
            except Exception as error:
                if not isinstance(error, RecdError):
                    cause, error = error, RecdError(f"{self.store.name}: rows: {error}")
                    error.__cause__ = cause
                self._error = error
        raise self._error

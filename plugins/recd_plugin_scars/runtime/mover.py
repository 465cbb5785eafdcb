"""Rows on their way from the backing store and back, while the step goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from recd_plugin_scars.runtime.backing_store import BackingStore
from recd_plugins.api import RecdError

Result = TypeVar("Result")


class Pending:
    """Rows that are being read."""

    def __init__(self, mover: RowMover, rows: Future[tuple[Tensor, Tensor | None]]) -> None:
        self._mover = mover
        self._rows = rows

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Weights, float32 ``[n, dim]``, and optimizer state, float32 ``[n]`` or None.

        They are the caller's. Locked memory goes back to torch's allocator with the last reference,
        which gives it out again when copies of it to a device are done.

        Raises:
            RecdError: this read, or what was queued before it, failed.
        """
        return self._mover._result(self._rows)


class RowMover:
    """Reads and writes rows of one backing store in one thread, first in, first out.

    A read sees every write that was queued before it. Each kernel has its own mover, so that one
    waits for no other; its thread starts with the first row that moves and sleeps while there is
    nothing to do. One is enough for either kind of store: it copies rows of memory as fast as
    memory is, and has many requests to a disk at a time. There are few kernels: one for each width
    of cached tables.

    After an error nothing moves any more: it is raised by each call from then on. The caller of
    ``close`` also sees it, unless it was raised before.

    Args:
        store: used by nobody else between ``read`` or ``write`` and ``drain``.
        pin: buffers are locked memory, for copies to and from a CUDA device.
    """

    def __init__(self, store: BackingStore, *, pin: bool = False) -> None:
        self.store = store
        self._pin = pin
        self._process = os.getpid()
        # One worker takes what is submitted in order, ends with its owner, and is waited for at
        # the end of the interpreter.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rows of {store.name}")
        self._error: RecdError | None = None
        self._is_error_raised = False
        self._is_closed = False

    def buffers(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Memory for rows to ``write``: ``[num_rows, dim]``, and ``[num_rows]`` for their state."""
        weights = torch.empty(num_rows, self.store.weights.shape[1], pin_memory=self._pin)
        if self.store.state is None:
            return weights, None
        return weights, torch.empty(num_rows, pin_memory=self._pin)

    def read(self, rows: Tensor) -> Pending:
        """Start to read rows.

        Args:
            rows: int64 ``[n]`` on the CPU, in any order; not to be changed any more.

        Raises:
            RecdError: something failed before; or the mover is closed, or another process's.
        """

        def read() -> tuple[Tensor, Tensor | None]:
            weights, state = self.buffers(len(rows))
            self.store.read(rows, weights, state)
            return weights, state

        return Pending(self, self._submit(read))

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
            ready: the thread waits for it, such as for the end of a copy from a device.

        Raises:
            RecdError: as ``read``.
        """

        def write() -> None:
            if ready is not None:
                ready.synchronize()
            self.store.write(rows, weights, state)

        self._submit(write)

    def drain(self) -> None:
        """Return when everything queued is done.

        Raises:
            RecdError: something failed.
        """
        self._result(self._submit(lambda: None))

    def close(self) -> None:
        """Do what is queued and end the thread. Calling it again does nothing.

        Raises:
            RecdError: something failed that no call has told yet.
        """
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        self._thread.shutdown()
        if self._error is not None and not self._is_error_raised:
            self._raise()

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        self._check()
        return self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        """In the thread: what follows an error is not done."""
        if self._error is None:
            try:
                return work()
            except RecdError as error:
                self._error = error
            except Exception as error:
                self._error = RecdError(f"{self.store.name}: rows could not be moved ({error})")
                self._error.__cause__ = error
        raise self._error

    def _result(self, future: Future[Result]) -> Result:
        try:
            return future.result()
        except RecdError:
            self._raise()

    def _check(self) -> None:
        if self._process != os.getpid():
            raise RecdError(
                f"{self.store.name}: rows are moved by a thread of process {self._process}, "
                "which a forked process lacks; start processes by spawn, or shard after the fork"
            )
        if self._error is not None:
            self._raise()
        if self._is_closed:
            raise RecdError(f"{self.store.name}: is closed, no row can be moved any more")

    def _raise(self) -> NoReturn:
        assert self._error is not None
        self._is_error_raised = True
        raise self._error

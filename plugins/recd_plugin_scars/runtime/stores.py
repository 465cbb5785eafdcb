"""Backing stores of cached tables, which store all rows in host memory or in files."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.api import RecdError, SetupError

#: Number of bytes that ``BackingStore.fill`` initialises at a time.
FILL_BYTES = 1 << 26
_PAGE = mmap.PAGESIZE
_WILLNEED = os.POSIX_FADV_WILLNEED
# Number of rows to request ahead of reads: enough to keep a disk busy, and few enough for a small
# page cache.
_ROWS_AHEAD = 1024

_transfer = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread: Any = types.ExternalFunction("pread", _transfer)
_pwrite: Any = types.ExternalFunction("pwrite", _transfer)
_fadvise: Any = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)


class BackingStore:
    """Stores all rows of a cached kernel's tables in host memory, concatenated.

    Only one thread may call ``read`` and ``write``. Both release the GIL most of the time.

    Attributes:
        weights: float32 ``[num_rows, dim]``, contiguous, on the CPU, initially zero.
        state: optimizer state, float32 ``[num_rows]``; None without optimizer state.
    """

    weights: Tensor
    state: Tensor | None

    def __init__(self, *, name: str, num_rows: int, dim: int, with_state: bool) -> None:
        self.name = name
        self.weights = torch.zeros(num_rows, dim)
        self.state = torch.zeros(num_rows) if with_state else None
        # The kernel may turn ``weights`` into a parameter; these copies bypass autograd.
        self._weights = self.weights.detach()

    def read(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy the given rows of the store into ``weights`` and ``state``.

        Args:
            rows: row numbers, int64 ``[n]``.
            weights: output, float32 ``[n, dim]``.
            state: output, float32 ``[n]``; None without optimizer state.

        Raises:
            RecdError: the disk reports an error.
        """
        torch.index_select(self._weights, 0, rows, out=weights)
        if self.state is not None and state is not None:
            torch.index_select(self.state, 0, rows, out=state)

    def write(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy ``weights`` and ``state`` into the given rows, which must be distinct."""
        self._weights.index_copy_(0, rows, weights)
        if self.state is not None and state is not None:
            self.state.index_copy_(0, rows, state)

    def fill(self, initialise: Callable[[Tensor], object]) -> None:
        """Call ``initialise`` with successive blocks of rows of the weights."""
        num_rows = max(FILL_BYTES // (4 * self.weights.shape[1]), 1)
        weights = self.weights.detach()
        for first in range(0, len(weights), num_rows):
            initialise(weights[first : first + num_rows])

    def close(self) -> None:
        """Close files. Do not use ``weights`` and ``state`` afterwards."""


class FileStore(BackingStore):
    """Backing store in two temporary files, for tables larger than memory.

    ``weights`` and ``state`` are memory maps of the files. The files are unlinked, so the operating
    system deletes them when the store closes or the process dies.

    Raises:
        SetupError: the folder is not writable, or the disk is full.
    """

    def __init__(
        self, folder: Path, *, name: str, num_rows: int, dim: int, with_state: bool
    ) -> None:
        self.name = name
        self._files: list[RowFile] = []
        self._end = weakref.finalize(self, _close, self._files)
        needed = 4 * num_rows * (dim + with_state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.weights = self._open(folder, num_rows, dim)
            self.state = self._open(folder, num_rows, 1).view(-1) if with_state else None
        except OSError as error:
            self._end()
            raise SetupError(
                f"{folder}: cannot allocate a file for {num_rows:,} table rows ({needed:,} bytes): "
                f"{error.strerror or error}. Use a folder on a local disk with enough free space."
            ) from error

    def read(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        ascending, places = (part.numpy() for part in rows.sort())
        for file, memory in zip(self._files, (weights, state), strict=False):
            assert memory is not None
            file.move("read", ascending, places, memory)

    def write(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        ascending, places = (part.numpy() for part in rows.sort())
        for file, memory in zip(self._files, (weights, state), strict=False):
            assert memory is not None
            file.move("written", ascending, places, memory)

    def close(self) -> None:
        self._end()

    def _open(self, folder: Path, num_rows: int, dim: int) -> Tensor:
        file = RowFile(folder, row_bytes=4 * dim, num_rows=num_rows)
        self._files.append(file)
        return file.mapped()


class RowFile:
    """A temporary file of fixed-size rows, with its disk space allocated at creation.

    Requests pages of the next rows with ``posix_fadvise``, so that one thread keeps many disk
    requests in flight. Reads each run of adjacent rows with one ``pread``, which reports disk
    errors, unlike a memory map.
    """

    def __init__(self, folder: Path, *, row_bytes: int, num_rows: int) -> None:
        self._folder = folder
        self._row_bytes = row_bytes
        self._num_rows = num_rows
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - close() closes it
        self._descriptor = self._file.fileno()
        if num_rows:
            os.posix_fallocate(self._descriptor, 0, row_bytes * num_rows)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def mapped(self) -> Tensor:
        """Return a memory map of the file, float32 ``[num_rows, row_bytes / 4]``."""
        shape = (self._num_rows, self._row_bytes // 4)
        if self._num_rows == 0:
            return torch.empty(shape)
        # Opened a second time so that the mapping keeps its readahead.
        with open(f"/proc/self/fd/{self._descriptor}", "r+b") as file:
            mapping = mmap.mmap(file.fileno(), self._num_rows * self._row_bytes)
        return torch.frombuffer(mapping, dtype=torch.float32).view(shape)

    def move(
        self, done: str, rows: NDArray[np.int64], places: NDArray[np.int64], memory: Tensor
    ) -> None:
        """Read rows from the file into ``memory``, or write rows from ``memory`` to the file.

        Args:
            done: ``read`` or ``written``.
            rows: row numbers in the file, ascending, int64 ``[n]``.
            places: row index in ``memory`` of each of ``rows``, int64 ``[n]``.
            memory: float32 ``[n, row_bytes / 4]``.

        Raises:
            RecdError: the disk reports an error.
        """
        kernel: Any = _read_rows if done == "read" else _write_rows
        first = kernel(self._descriptor, self._row_bytes, rows, places, memory.data_ptr(), 0)
        while first < len(rows):
            try:
                self._move_again(done, int(rows[first]), int(places[first]), memory)
            except OSError as error:
                raise RecdError(
                    f"{self._folder}: row {rows[first]} could not be {done} "
                    f"({error.strerror or error}). Check the disk."
                ) from error
            first = kernel(
                self._descriptor, self._row_bytes, rows, places, memory.data_ptr(), first + 1
            )

    def close(self) -> None:
        self._file.close()

    def _move_again(self, done: str, row: int, place: int, memory: Tensor) -> None:
        """Retry one failed row in Python, to raise an OSError with the cause."""
        size, offset = self._row_bytes, row * self._row_bytes
        piece = memory.numpy().data.cast("B")[place * size : (place + 1) * size]
        if done == "written":
            moved = os.pwrite(self._descriptor, piece, offset)
        else:
            moved = os.preadv(self._descriptor, [piece], offset)
        if moved < size:
            raise OSError(f"{moved} of {size} bytes")


def open_backing_store(
    folder: Path | None, *, name: str, num_rows: int, dim: int, with_state: bool
) -> BackingStore:
    """Create a backing store in files in ``folder``, or in host memory if ``folder`` is None."""
    if folder is None:
        return BackingStore(name=name, num_rows=num_rows, dim=dim, with_state=with_state)
    return FileStore(folder, name=name, num_rows=num_rows, dim=dim, with_state=with_state)


def _close(files: list[RowFile]) -> None:
    for file in files:
        file.close()


@numba.njit(cache=True, nogil=True)
def _read_rows(
    descriptor: Any, row_bytes: Any, rows: Any, places: Any, memory: Any, first: Any
) -> Any:
    """Read ``rows[first:]``. Return the index of the first failed row, or ``len(rows)``."""
    advised, next_page = first, np.int64(0)
    while first < len(rows):
        while advised < min(first + _ROWS_AHEAD, len(rows)):
            page = max(rows[advised] * row_bytes // _PAGE, next_page)
            next_page = max(((rows[advised] + 1) * row_bytes - 1) // _PAGE + 1, next_page)
            if page < next_page:
                _fadvise(descriptor, page * _PAGE, (next_page - page) * _PAGE, _WILLNEED)
            advised += 1
        end = _end_of_run(rows, places, first)
        size = np.uintp((end - first) * row_bytes)
        address = np.uintp(memory + places[first] * row_bytes)
        if _pread(descriptor, address, size, rows[first] * row_bytes) != size:
            return first
        first = end
    return first


@numba.njit(cache=True, nogil=True)
def _write_rows(
    descriptor: Any, row_bytes: Any, rows: Any, places: Any, memory: Any, first: Any
) -> Any:
    """Write ``rows[first:]``. Return the index of the first failed row, or ``len(rows)``."""
    while first < len(rows):
        end = _end_of_run(rows, places, first)
        size = np.uintp((end - first) * row_bytes)
        address = np.uintp(memory + places[first] * row_bytes)
        if _pwrite(descriptor, address, size, rows[first] * row_bytes) != size:
            return first
        first = end
    return first


@numba.njit(inline="always")
def _end_of_run(rows: Any, places: Any, first: Any) -> Any:
    """Return the end of the run of rows after ``first`` that are adjacent in file and memory."""
    end = first + 1
    while end < len(rows) and rows[end] == rows[end - 1] + 1 and places[end] == places[end - 1] + 1:
        end += 1
    return end


Result = TypeVar("Result")


class RowMover:
    """Reads and writes rows of one backing store in a background thread, in FIFO order.

    A read returns the values of all earlier writes. After an error, all further calls raise the
    same error.

    Args:
        store: the backing store. Do not use it elsewhere between ``read`` or ``write`` and
            ``drain``.
        pin: whether to use pinned memory, for copies to and from a GPU.
    """

    def __init__(self, store: BackingStore, *, pin: bool = False) -> None:
        self.store = store
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rows of {store.name}")
        self._error: RecdError | None = None

    def buffers(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Return new buffers for weights, float32 ``[num_rows, dim]``, and optimizer state.

        The state buffer is float32 ``[num_rows]``, or None without optimizer state.
        """
        weights = torch.empty(num_rows, self.store.weights.shape[1], pin_memory=self._pin)
        if self.store.state is None:
            return weights, None
        return weights, torch.empty(num_rows, pin_memory=self._pin)

    def read(self, rows: Tensor) -> Future[tuple[Tensor, Tensor | None]]:
        """Start to read rows. Do not change the tensor ``rows``, int64 ``[n]``, afterwards.

        Returns:
            A future of the weights, float32 ``[n, dim]``, and the optimizer state, float32 ``[n]``
            or None. Its ``result()`` raises RecdError if this read fails.

        Raises:
            RecdError: an earlier read or write failed.
        """

        def read() -> tuple[Tensor, Tensor | None]:
            weights, state = self.buffers(len(rows))
            self.store.read(rows, weights, state)
            return weights, state

        return self._submit(read)

    def write(
        self,
        rows: Tensor,
        weights: Tensor,
        state: Tensor | None,
        *,
        ready: torch.cuda.Event | None = None,
    ) -> None:
        """Start to write rows. Do not use the tensors afterwards.

        Args:
            rows: distinct row numbers, int64 ``[n]``.
            weights: float32 ``[n, dim]``.
            state: float32 ``[n]``; None without optimizer state.
            ready: event to wait for before writing, such as the end of a copy from the GPU.

        Raises:
            RecdError: an earlier read or write failed.
        """

        def write() -> None:
            if ready is not None:
                ready.synchronize()
            self.store.write(rows, weights, state)

        self._submit(write)

    def drain(self) -> None:
        """Wait for all queued reads and writes. Raises RecdError if one failed."""
        self._submit(lambda: None).result()

    def close(self) -> None:
        """Finish all queued reads and writes, and end the thread. May be called twice."""
        self._thread.shutdown()

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._error is not None:
            raise self._error
        return self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        if self._error is None:
            try:
                return work()
            except Exception as error:
                if not isinstance(error, RecdError):
                    cause, error = (
                        error,
                        RecdError(
                            f"{self.store.name}: reading or writing cached rows failed: {error}"
                        ),
                    )
                    error.__cause__ = cause
                self._error = error
        raise self._error

"""Backing stores: all rows of the tables of a cached kernel, in host memory or in files."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.api import RecdError, SetupError

#: ``fill`` initialises about this many bytes at a time.
FILL_BYTES = 1 << 26
_PAGE = mmap.PAGESIZE
_WILLNEED = os.POSIX_FADV_WILLNEED
# Rows requested before the first is awaited: enough to keep a disk busy, and few enough not to
# evict one another from a small page cache.
_ROWS_AHEAD = 1024

_transfer = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread: Any = types.ExternalFunction("pread", _transfer)
_pwrite: Any = types.ExternalFunction("pwrite", _transfer)
_fadvise: Any = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)


class BackingStore:
    """The rows of a kernel's tables, one table below the other, in host memory.

    ``read`` and ``write`` are called from one thread at a time (a ``RowMover``'s) and release the
    GIL for most of their work. They see changes of ``weights`` and ``state``, and the reverse.

    Args:
        name: of the store, for messages.
        num_rows: of all tables of the kernel on this rank.
        dim: values per row.
        with_state: whether each row has one float32 of optimizer state.

    Attributes:
        weights: float32 ``[num_rows, dim]``, contiguous, on the CPU; zeros at first.
        state: float32 ``[num_rows]``; None without optimizer state.

    Raises:
        SetupError: there is not enough memory.
    """

    weights: Tensor
    state: Tensor | None

    def __init__(self, *, name: str, num_rows: int, dim: int, with_state: bool) -> None:
        self.name = name
        try:
            self.weights = torch.zeros(num_rows, dim)
            self.state = torch.zeros(num_rows) if with_state else None
        except RuntimeError as error:
            needed = 4 * num_rows * (dim + with_state)
            raise SetupError(
                f"{name}: {num_rows:,} rows of {dim} values need {needed:,} bytes of memory, "
                f"which are not free ({error}); keep the table in a file"
            ) from error
        # The kernel may turn ``weights`` into a parameter; these copies bypass autograd.
        self._weights = self.weights.detach()

    def read(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy rows out.

        Args:
            rows: int64 ``[n]``, in any order.
            weights: float32 ``[n, dim]``, contiguous, overwritten.
            state: float32 ``[n]``, overwritten; None without optimizer state.

        Raises:
            RecdError: the disk refused a row.
        """
        torch.index_select(self._weights, 0, rows, out=weights)
        if self.state is not None and state is not None:
            torch.index_select(self.state, 0, rows, out=state)

    def write(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy rows in; as ``read``, but no row may occur twice."""
        self._weights.index_copy_(0, rows, weights)
        if self.state is not None and state is not None:
            self.state.index_copy_(0, rows, state)

    def fill(self, initialise: Callable[[Tensor], object]) -> None:
        """Initialise the weights, a block of rows after the other.

        Args:
            initialise: fills float32 ``[n, dim]`` in place. Blocks come in order, so a generator
                gives the values that it would give for all rows at once.
        """
        num_rows = max(FILL_BYTES // (4 * self.weights.shape[1]), 1)
        weights = self.weights.detach()
        for first in range(0, len(weights), num_rows):
            initialise(weights[first : first + num_rows])

    def close(self) -> None:
        """Release files. ``weights`` and ``state`` must not be used afterwards."""


class FileStore(BackingStore):
    """Rows in one temporary file and optimizer state in another, for tables larger than memory.

    The files have no names: the system frees them with the store, or with the process if it is
    killed. Both are also mapped into memory as ``weights`` and ``state``.

    Args:
        folder: on the disk that holds the files; made if missing.

    Raises:
        SetupError: the folder cannot be written, or the disk has no room.
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
                f"{folder}: cannot hold {num_rows:,} rows of {needed:,} bytes "
                f"({error.strerror or error}): name a folder on a local disk with as much room"
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
    """A nameless file of equally long rows.

    Reads go through the page cache: the pages of the next rows are requested
    (``posix_fadvise``), so that one thread keeps many requests in flight, then each run of
    adjacent rows is one ``pread``. Unlike through a mapping, an error of the disk can be caught.

    Args:
        folder: where the file is made.
        row_bytes: length of a row.
        num_rows: rows of the file; the disk space is allocated at once.

    Raises:
        OSError: no room, or the folder cannot be written.
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
        """Map the file as float32 ``[num_rows, row_bytes / 4]``."""
        shape = (self._num_rows, self._row_bytes // 4)
        if self._num_rows == 0:
            return torch.empty(shape)
        # Opened again, as the mapping shall keep its readahead.
        with open(f"/proc/self/fd/{self._descriptor}", "r+b") as file:
            mapping = mmap.mmap(file.fileno(), self._num_rows * self._row_bytes)
        return torch.frombuffer(mapping, dtype=torch.float32).view(shape)

    def move(
        self, done: str, rows: NDArray[np.int64], places: NDArray[np.int64], memory: Tensor
    ) -> None:
        """Copy rows from the file to memory, or back.

        Args:
            done: ``read`` or ``written``.
            rows: int64 ``[n]``, ascending.
            places: int64 ``[n]``, the row of ``memory`` for each.
            memory: contiguous, rows as wide as the file's.

        Raises:
            RecdError: the disk refused a row.
        """
        kernel: Any = _read_rows if done == "read" else _write_rows
        first = kernel(self._descriptor, self._row_bytes, rows, places, memory.data_ptr(), 0)
        while first < len(rows):
            try:
                self._move_again(done, int(rows[first]), int(places[first]), memory)
            except OSError as error:
                raise RecdError(
                    f"{self._folder}: row {rows[first]} could not be {done} "
                    f"({error.strerror or error})"
                ) from error
            first = kernel(
                self._descriptor, self._row_bytes, rows, places, memory.data_ptr(), first + 1
            )

    def close(self) -> None:
        self._file.close()

    def _move_again(self, done: str, row: int, place: int, memory: Tensor) -> None:
        """Move a row that the compiled loop could not, through Python, which names the error."""
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
    """Open a store in files in ``folder``, or in host memory without one."""
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
    """Read rows from the ``first``; gives the one that could not be read, or their number."""
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
    """Write rows from the ``first``; gives the one that could not be written, or their number."""
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
    """The row after those that are adjacent in the file and in memory."""
    end = first + 1
    while end < len(rows) and rows[end] == rows[end - 1] + 1 and places[end] == places[end - 1] + 1:
        end += 1
    return end

"""Rows of a file, read and written by their positions."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from recd_plugins.api import RecdError

_PAGE = mmap.PAGESIZE
_WILLNEED = os.POSIX_FADV_WILLNEED
# So many rows are asked for before the first of them is waited for: enough to keep a disk busy, and
# few enough not to push each other out of a small page cache.
_ROWS_AHEAD = 1024

_transfer = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread: Any = types.ExternalFunction("pread", _transfer)
_pwrite: Any = types.ExternalFunction("pwrite", _transfer)
_fadvise: Any = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)


class RowFile:
    """A file of equally long rows and nothing else.

    Reading goes by the page cache: pages of the rows to come are asked for (``posix_fadvise``), so
    that the disk has many requests at a time though one thread reads; then each row, or run of
    adjacent rows, is one ``pread``. Unlike through a mapping, what the disk refuses is an error
    that can be caught. Memory mapped from the same file shows the same bytes.

    Args:
        path: of a file that is there.
        row_bytes: length of a row.
        num_rows: that the file has.
    """

    def __init__(self, path: Path, *, row_bytes: int, num_rows: int) -> None:
        self.path = path
        self._row_bytes = row_bytes
        self._num_rows = num_rows
        # The mapping has a descriptor of its own, for which readahead stays as it is.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def mapped(self) -> Tensor:
        """The file as float32 ``[num_rows, row_bytes / 4]`` in memory that is the file's."""
        shape = (self._num_rows, self._row_bytes // 4)
        if self._num_rows == 0:
            return torch.empty(shape)
        with self.path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), self._num_rows * self._row_bytes)
        return torch.frombuffer(mapping, dtype=torch.float32).view(shape)

    def read(self, rows: NDArray[np.int64], places: NDArray[np.int64], memory: Tensor) -> None:
        """Copy rows to their places in memory.

        Args:
            rows: ascending.
            places: of each of them in ``memory``.
            memory: contiguous, as wide as the rows.

        Raises:
            RecdError: names file and rows.
        """
        self._move("read", rows, places, memory)

    def write(self, rows: NDArray[np.int64], places: NDArray[np.int64], memory: Tensor) -> None:
        """Copy rows from their places in memory; as ``read``."""
        self._move("written", rows, places, memory)

    def flush(self) -> None:
        """Return when the disk has everything.

        Raises:
            RecdError: it has not, and what it lacks is lost.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise RecdError(f"{self.path}: could not be written ({error.strerror})") from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _move(
        self,
        done: Literal["read", "written"],
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        memory: Tensor,
    ) -> None:
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self._num_rows:
            raise RecdError(
                f"{self.path}: rows {rows[0]} to {rows[-1]} could not be {done}: the table has "
                f"{self._num_rows} rows"
            )
        kernel: Any = _read_rows if done == "read" else _write_rows
        first = 0
        while True:
            first = kernel(
                self._descriptor, self._row_bytes, rows, places, memory.data_ptr(), first
            )
            if first == len(rows):
                return
            try:
                self._move_again(done, int(rows[first]), int(places[first]), memory)
            except OSError as error:
                raise RecdError(
                    f"{self.path}: row {rows[first]} (of {len(rows)} rows from {rows[0]} to "
                    f"{rows[-1]}) could not be {done} ({error.strerror or error})"
                ) from error
            first += 1

    def _move_again(self, done: str, row: int, place: int, memory: Tensor) -> None:
        """Move a row that the compiled loop could not, by Python, which knows what is wrong."""
        size, offset = self._row_bytes, row * self._row_bytes
        piece = memory.numpy().data.cast("B")[place * size : (place + 1) * size]
        if done == "written":
            moved = os.pwrite(self._descriptor, piece, offset)
        else:
            moved = os.preadv(self._descriptor, [piece], offset)
        if moved < size:
            raise OSError(f"{moved} of {size} bytes")


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

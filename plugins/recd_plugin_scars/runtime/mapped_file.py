"""Rows in memory-mapped files, for tables larger than memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from recd_plugin_scars.runtime.backing_store import BackingStore
from recd_plugin_scars.runtime.row_file import RowFile
from recd_plugin_scars.runtime.store_folder import (
    STATE,
    WEIGHTS,
    StoreFolder,
    StoreShape,
    tables_of_shards,
)


class FileStore(BackingStore):
    """Rows in one file and optimizer state in another, both also mapped into memory.

    Without ``keep`` the files are gone after ``close``, or with the store, or the process, unless
    that is killed. With it they wait for a later run after ``close``, which alone marks them whole
    again once rows have changed; until then files of an earlier run stay whole, and new ones go.

    Args:
        folder: of the stores of a run; this one makes a folder in it.
        keep: leave the rows for a later run, and go on with those of an earlier one.

    Other arguments and errors are those of ``open_backing_store``.

    Attributes:
        path: the folder of its files.
        keep: as given.
        tables: of its shards.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: bool,
        name: str,
        num_rows: int,
        dim: int,
        with_state: bool,
        shards: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.keep = keep
        self.tables = tables_of_shards(shards)
        shape = StoreShape(name, num_rows, dim, with_state, list(shards))
        self._folder = StoreFolder(folder, shape, keep=keep)
        self.path, self.is_kept = self._folder.path, self._folder.is_kept
        self._files: list[RowFile] = []
        self._end = weakref.finalize(self, _end, self._folder, self._files, os.getpid())
        try:
            self.weights = self._open(WEIGHTS, num_rows, dim)
            self.state = self._open(STATE, num_rows, 1).view(-1) if with_state else None
        except BaseException:
            self._end()
            raise

    def read(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        ascending, places = (part.numpy() for part in rows.sort())
        for file, memory in zip(self._files, (weights, state), strict=False):
            assert memory is not None
            file.read(ascending, places, memory)

    def write(self, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        self._folder.change()
        ascending, places = (part.numpy() for part in rows.sort())
        for file, memory in zip(self._files, (weights, state), strict=False):
            assert memory is not None
            file.write(ascending, places, memory)

    def lend(self) -> None:
        # New rows get their first values so, which a later run draws again if this one ends early.
        if self.is_kept:
            self._folder.change()

    def flush(self) -> None:
        for file in self._files:
            file.flush()

    def close(self) -> None:
        if not self._end.alive:
            return
        try:
            if self.keep:
                self.flush()
                self._folder.complete()
        finally:
            self._end()

    def give_up(self) -> None:
        """Leave what was found as it is, and take away what is new."""
        self._end()

    def _open(self, name: str, num_rows: int, dim: int) -> Tensor:
        file = RowFile(self._folder.path / name, row_bytes=4 * dim, num_rows=num_rows)
        self._files.append(file)
        return file.mapped()


def _end(folder: StoreFolder, files: list[RowFile], process: int) -> None:
    # The files of a forked process are its parent's.
    if os.getpid() != process:
        return
    for file in files:
        file.close()
    if folder.is_scratch:
        folder.remove_files()
    folder.release()

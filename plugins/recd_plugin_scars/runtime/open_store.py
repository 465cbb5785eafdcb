"""Backing stores by where a cache keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recd_plugin_scars.runtime.backing_store import BackingStore
from recd_plugin_scars.runtime.host_memory import MemoryStore
from recd_plugin_scars.runtime.mapped_file import FileStore
from recd_plugin_scars.runtime.spec import HostMemory, MappedFile


def open_backing_store(
    storage: HostMemory | MappedFile,
    *,
    name: str,
    num_rows: int,
    dim: int,
    with_state: bool,
    shards: Sequence[str] = (),
) -> BackingStore:
    """Make the backing store of a kernel, or open the one that an earlier run kept.

    Args:
        storage: in memory, or in files.
        name: of the store; no other kernel and no other rank may have the same.
        num_rows: of all tables of the kernel, as far as this rank holds them.
        dim: values of a row.
        with_state: each row has an optimizer state of one float32.
        shards: what the rows are of, in order, in words; kept files have to be of the same.

    Returns:
        Weights and state are zero unless ``is_kept``.

    Raises:
        SetupError: there is not enough memory or disk (how much is missing is said), or the files
            are in use.
        DataError: files that an earlier run kept are not those of this table, or incomplete.
    """
    if isinstance(storage, MappedFile):
        return FileStore(
            Path(storage.folder),
            keep=storage.keep,
            name=name,
            num_rows=num_rows,
            dim=dim,
            with_state=with_state,
            shards=shards,
        )
    return MemoryStore(name=name, num_rows=num_rows, dim=dim, with_state=with_state)

"""What runs in Ray's processes: a reader, which makes blocks of batches by their numbers."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

# A store of the cluster for small values; the name has an underscore, and there is no other.
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

from recd_plugins.api import RecdError

if TYPE_CHECKING:
    from recd_plugins.api import BatchBlock, State, TaskReader


def make_blocks(
    numbers: pa.Table, task: bytes, position: State, stride: int | None, stream: str
) -> Iterator[pa.Table]:
    """Each block as a row: its bytes, and what the trainer is to know."""
    for number in numbers["number"].to_pylist():
        begun = f"recd/{stream}/{number}".encode()
        again = bool(_internal_kv_put(begun, b"", overwrite=False))
        for block in _blocks(number, task, position, stride):
            yield _row(block, again)
            again = False
        _internal_kv_del(begun)


def warm_up(task: bytes, position: State) -> None:
    """Make a block for nothing: modules are imported then, kernels loaded and files open."""
    with suppress(RecdError):
        _open(task).block(position, 0)


def _blocks(number: int, task: bytes, position: State, stride: int | None) -> Iterable[BatchBlock]:
    from recd_plugins.api import BatchBlock, portable

    try:
        reader = _open(task)
    except Exception as error:
        return [BatchBlock(number, [], portable(error))]
    if stride is None:
        return [reader.block(position, number)]
    return reader.blocks(position, number, stride)


# Ray keeps its processes from one task to the next, and from one epoch to the next.
@lru_cache(maxsize=1)
def _open(task: bytes) -> TaskReader:
    from recd_plugins.api import silence_upstream

    silence_upstream()
    reader: TaskReader = pickle.loads(task).open()
    return reader


def _row(block: BatchBlock, again: bool) -> pa.Table:
    from recd_plugins.api import encode

    start = time.perf_counter()
    data = encode(block)
    row: dict[str, Any] = {
        "last": block.end is not None,
        "process": os.getpid(),
        "again": again,
        "packing": time.perf_counter() - start,
    }
    columns = {name: pa.array([value]) for name, value in row.items()}
    offsets = pa.array([0, data.nbytes], pa.int64()).buffers()[1]
    columns["data"] = pa.Array.from_buffers(
        pa.large_binary(), 1, [None, offsets, pa.py_buffer(data)]
    )
    return pa.table(columns)

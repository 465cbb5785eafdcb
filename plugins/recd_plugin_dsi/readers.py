"""What runs in Ray's processes: a reader, which makes blocks of batches by their numbers."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from recd_plugins.errors import RecdError
from recd_plugins.processes import portable

if TYPE_CHECKING:
    from recd_plugins.data.work import Block, State, WorkReader


class BlockReader:
    """Takes block numbers, yields each block as a row of bytes and what the trainer is to know.

    Args:
        work: a ``Work``, pickled.
        position: the one that block numbers count from.
        stride: None where a number asks for that block; else it asks for every ``stride``-th block
            from that one on.
    """

    def __init__(self, work: bytes, position: State, stride: int | None) -> None:
        self._work = work
        self._position = position
        self._stride = stride
        self._reader: WorkReader | None = None
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def __call__(self, numbers: pa.Table) -> Iterator[pa.Table]:
        for number in numbers["number"].to_pylist():
            for block in self._blocks(number):
                yield self._row(block)

    def _blocks(self, number: int) -> Iterable[Block]:
        from recd_plugins.data.work import Block

        try:
            reader = self._open()
        except RecdError as error:
            return [Block(number, [], portable(error))]
        if self._stride is None:
            return [reader.block(self._position, number)]
        return reader.blocks(self._position, number, self._stride)

    def _open(self) -> WorkReader:
        # With the first block: an error, or a death, is then one of that block.
        if self._reader is None:
            from recd_plugins.training import upstream_noise

            upstream_noise.silence()
            self._reader = pickle.loads(self._work).open()
        return self._reader

    def _row(self, block: Block) -> pa.Table:
        from recd_plugins.data.wire import encode

        start = time.perf_counter()
        data = encode(block)
        row: dict[str, Any] = {
            "number": block.number,
            "last": block.end is not None,
            "process": os.getpid(),
            "again": self._again,
            "packing": time.perf_counter() - start,
        }
        columns = {name: pa.array([value]) for name, value in row.items()}
        offsets = pa.array([0, data.nbytes], pa.int64()).buffers()[1]
        columns["data"] = pa.Array.from_buffers(
            pa.large_binary(), 1, [None, offsets, pa.py_buffer(data)]
        )
        return pa.table(columns)

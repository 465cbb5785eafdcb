"""Memory that is used again: memory new from the system costs as much as copying into it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

_ALIGNMENT = 64
#: Room that a new block has beyond what is asked for: the next one is a little larger, maybe.
SPARE = 1.125


class Arena:
    """Hands out a block at a time, the same again once no Arrow array refers to it."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def block(self, size: int) -> np.ndarray:
        """uint8, at least ``size``, with any content."""
        free = [index for index in range(len(self._blocks)) if _uses(self._blocks, index) == _IDLE]
        for index in free:
            if len(self._blocks[index]) >= size:
                return self._blocks[index]
        for index in reversed(free):
            del self._blocks[index]
        self._blocks.append(np.empty(int(size * SPARE), np.uint8))
        return self._blocks[-1]


def _uses(blocks: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(blocks[index])


#: Of a block to which only its list refers.
_IDLE = _uses([np.empty(0, np.uint8)], 0)


def buffers_of(arena: Arena, sizes: Iterable[int]) -> Iterator[Any]:
    """Writable Arrow buffers of these sizes, in one block."""
    sizes = list(sizes)
    block = arena.block(sum(map(_aligned, sizes)) + _ALIGNMENT)
    at = -block.ctypes.data % _ALIGNMENT
    for size in sizes:
        yield pa.py_buffer(block[at : at + size])
        at += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

"""Objects that hold tensors as bytes: the tensors first, then the pickle of what holds them."""

from __future__ import annotations

import io
import pickle
from math import prod
from typing import Any

import torch
from torch import Tensor

#: A tensor starts where a cache line does, as in memory that torch allocates.
ALIGNMENT = 64

#: Of a tensor in the bytes: where it starts, its type and its shape.
Place = tuple[int, torch.dtype, tuple[int, ...]]


class Packing:
    """``value``, ready to be written; a tensor that occurs twice is written once.

    Attributes:
        end: bytes of the tensors, behind which the pickle stands.
        size: bytes of all.
    """

    def __init__(self, value: Any) -> None:
        stream = io.BytesIO()
        self._pickler = _Pickler(stream)
        self._pickler.dump(value)
        self._structure = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        self.end = self._pickler.end
        self.size = self.end + len(self._structure)

    def write(self, data: Tensor) -> None:
        """Copy everything to ``data``, uint8 ``[size]``."""
        for place, tensor in self._pickler.tensors:
            _at(data, place).copy_(tensor)
            # What stood in this memory before goes nowhere.
            end = place[0] + tensor.nbytes
            data[end : _aligned(end)] = 0
        data[self.end :] = self._structure


def unpack_from(data: Tensor, end: int) -> Any:
    """What was written to ``data``; its tensors are views of it, which lives as long as they."""
    return _Unpickler(io.BytesIO(data[end:].numpy().tobytes()), data).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[Place, Tensor]] = []
        self.end = 0
        self._places: dict[int, Place] = {}

    def persistent_id(self, value: Any) -> Place | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._places:
            place = self.end, value.dtype, tuple(value.shape)
            self._places[id(value)] = place
            self.tensors.append((place, value))
            self.end += _aligned(value.nbytes)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, data: Tensor) -> None:
        super().__init__(stream)
        self._data = data
        self._tensors: dict[Place, Tensor] = {}

    def persistent_load(self, place: Place) -> Tensor:
        if place not in self._tensors:
            self._tensors[place] = _at(self._data, place)
        return self._tensors[place]


def _at(data: Tensor, place: Place) -> Tensor:
    start, dtype, shape = place
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

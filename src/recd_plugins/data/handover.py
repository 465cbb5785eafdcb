"""Objects that hold tensors, handed to another process in one piece of shared memory.

Sent one by one, each tensor would take a file descriptor and a connection to fetch it with. Here
all of them stand in one tensor of bytes, with the pickle of what holds them at its end.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from recd_plugins.errors import SetupError

# A tensor starts where a cache line does, as in memory that torch allocates.
_ALIGNMENT = 64

#: Of a tensor in the bytes: where it starts, its type and its shape.
Place = tuple[int, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Packed:
    """An object as bytes.

    Attributes:
        data: uint8, in shared memory.
        end: where the tensors end and the pickle starts.
    """

    data: Tensor
    end: int


def pack(value: Any) -> Packed:
    """``value`` with a copy of the CPU tensors in it; one that occurs twice is copied once.

    Raises:
        SetupError: the machine has too little shared memory.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    structure = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
    data = _shared(pickler.end + len(structure))
    for place, tensor in pickler.tensors:
        _at(data, place).copy_(tensor)
    data[pickler.end :] = structure
    return Packed(data, pickler.end)


def unpack(packed: Packed) -> Any:
    """The object again; its tensors are views of ``packed.data``, which lives as long as they."""
    stream = io.BytesIO(packed.data[packed.end :].numpy().tobytes())
    return _Unpickler(stream, packed.data).load()


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
            self.end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
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


def _shared(size: int) -> Tensor:
    try:
        # What torch's own default_collate calls in a worker; public ways write the memory twice.
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise SetupError(
            f"no {size / 1e6:.0f} MB of shared memory for batches: {error}; enlarge /dev/shm "
            "(docker run --shm-size), or lower training.workers or training.batch_size"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)

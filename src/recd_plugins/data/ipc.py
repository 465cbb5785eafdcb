"""Objects that hold tensors, sent to another process as one piece of bytes.

The tensors come first, at multiples of 64 bytes, then the pickle of the object. ``pack`` puts them
into shared memory for a process of this machine: sent one by one, each tensor would take a file
descriptor and a connection. ``encode`` adds a header for readers on other machines. Like everything
that processes of one training run pickle, it is for their connections only.
"""

from __future__ import annotations

import importlib.metadata
import io
import pickle
import struct
import time
import warnings
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from recd_plugins.runtime.errors import DataError, SetupError

#: Version of the layout of ``encode``; raised when it changes.
WIRE_VERSION = 1

# A tensor starts where a cache line does, as in memory that torch allocates.
_ALIGNMENT = 64
# CPUs read the widest scalar from a multiple of so many bytes.
_LEAST_ALIGNMENT = 8
# Magic, version of the layout, bytes of all tensors, bytes of everything, versions of packages.
_HEADER = struct.Struct("<8sQQQ160s")
_MAGIC = b"recdwire"
_START = _HEADER.size  # three times _ALIGNMENT: tensors keep theirs

#: Of a tensor in the bytes: where it starts, its type and its shape.
Place = tuple[int, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Packed:
    """An object as bytes.

    Attributes:
        data: uint8, in shared memory, or pinned.
        end: where the tensors end and the pickle starts.
        seconds: that packing and pinning took.
    """

    data: Tensor
    end: int
    seconds: float

    def pin_memory(self) -> Self:
        """Return the same in pinned memory, so that each unpacked tensor is pinned, too."""
        start = time.perf_counter()
        data = self.data.pin_memory()
        return replace(self, data=data, seconds=self.seconds + time.perf_counter() - start)


def pack(value: Any) -> Packed:
    """Copy ``value`` and its CPU tensors into shared memory; a tensor that occurs twice once."""
    start = time.perf_counter()
    packing = _Packing(value)
    data = _shared(packing.size)
    packing.write(data)
    return Packed(data, packing.end, time.perf_counter() - start)


def unpack(packed: Packed) -> Any:
    """Unpack an object. Its tensors are views of ``packed.data``, and keep that alive."""
    return _unpack_from(packed.data, packed.end)


def encode(value: Any) -> np.ndarray:
    """Return ``value`` with a copy of its CPU tensors, uint8 ``[bytes]``.

    A tensor that occurs twice is copied once.
    """
    packing = _Packing(value)
    size = _START + packing.size
    header = _HEADER.pack(_MAGIC, WIRE_VERSION, packing.end, size, _versions().encode())
    data = torch.empty(size, dtype=torch.uint8)
    data[:_START] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    packing.write(data[_START:])
    return data.numpy()


def decode(buffer: Any) -> Any:
    """Return the value of ``encode``. Its tensors are views of ``buffer``, and keep that alive.

    Args:
        buffer: anything with the buffer protocol (bytes, memoryview, numpy array). It is copied if
            it does not start at a multiple of 8 bytes.

    Raises:
        SetupError: it was made by another version of this package, torch or torchrec; says which.
        DataError: it is no such buffer, or not all of one.
    """
    size = memoryview(buffer).nbytes
    if size < _START:
        raise DataError(f"{size} bytes are no batch of a reader: not even its header")
    magic, version, end, expected, versions = _HEADER.unpack_from(buffer)
    if magic != _MAGIC:
        raise DataError(f"{size} bytes are no batch of a reader: they start with {magic!r}")
    theirs, ours = versions.rstrip(b"\0").decode(), _versions()
    if version != WIRE_VERSION or theirs != ours:
        raise SetupError(
            f"a reader has {theirs}, batches of version {version}; this trainer has {ours}, "
            f"version {WIRE_VERSION}: install the same on both"
        )
    if size != expected:
        raise DataError(f"a batch of a reader has {size} bytes instead of {expected}: it was cut")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        data = torch.frombuffer(buffer, dtype=torch.uint8)
    data = data if data.data_ptr() % _LEAST_ALIGNMENT == 0 else data.clone()
    return _unpack_from(data[_START:], end)


@cache
def _versions() -> str:
    names = ("recd-plugins-core", "torch", "torchrec")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _shared(size: int) -> Tensor:
    try:
        # As torch's own default_collate does in a worker; public ways write the memory twice.
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise SetupError(
            f"no {size / 1e6:.0f} MB of shared memory for batches: {error}; enlarge /dev/shm "
            "(docker run --shm-size), or lower training.workers or training.batch_size"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Packing:
    """``value``, ready to be written.

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
            # The former contents of this memory go nowhere.
            end = place[0] + tensor.nbytes
            data[end : _aligned(end)] = 0
        data[self.end :] = self._structure


def _unpack_from(data: Tensor, end: int) -> Any:
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
    return -(-size // _ALIGNMENT) * _ALIGNMENT

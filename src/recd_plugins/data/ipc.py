"""Serialization of objects that contain tensors, between processes of one training run.

Layout: a header with versions, tensors aligned to 64 bytes, and a pickle. Decoding unpickles, so
decode only bytes from trusted processes.
"""

from __future__ import annotations

import importlib.metadata
import io
import mmap
import os
import pickle
import struct
import warnings
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recd_plugins.runtime.errors import SetupError

_LAYOUT_VERSION = 2

# Tensors are aligned to cache lines, as torch's own memory is.
_ALIGNMENT = 64
# Header: start of the pickle, and versions. Its size is a multiple of _ALIGNMENT.
_HEADER = struct.Struct("<Q184s")

#: Start, dtype and shape of a serialized tensor.
Place = tuple[int, torch.dtype, tuple[int, ...]]


def encode(value: Any) -> np.ndarray:
    """Serialize ``value`` and its CPU tensors, each only once, to uint8 ``[bytes]``."""
    packing = _Packing(value)
    data = np.empty(packing.size, np.uint8)
    packing.write(torch.from_numpy(data))
    return data


def decode(buffer: Any) -> Any:
    """Deserialize a value. Its tensors are views of ``buffer`` and keep ``buffer`` alive.

    A buffer that is not aligned to 8 bytes is copied.

    Raises:
        SetupError: the encoding process had another version of this package, torch or torchrec.
    """
    end, versions = _HEADER.unpack_from(buffer)
    theirs, ours = versions.rstrip(b"\0").decode(errors="replace"), _versions()
    if theirs != ours:
        raise SetupError(
            f"a reader process uses {theirs}, but this trainer uses {ours}. Install the same "
            "versions on all machines"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        data = torch.frombuffer(buffer, dtype=torch.uint8)
    data = data if data.data_ptr() % 8 == 0 else data.clone()
    return _Unpickler(io.BytesIO(data[end:].numpy().tobytes()), data).load()


def encode_to_file(value: Any) -> tuple[int, int]:
    """Serialize ``value`` into an in-memory file. Return its descriptor and size in bytes."""
    packing = _Packing(value)
    file = os.memfd_create("recd-block")
    os.ftruncate(file, packing.size)
    packing.write(torch.frombuffer(mmap.mmap(file, packing.size), dtype=torch.uint8))
    return file, packing.size


def decode_file(file: int, size: int, pin_memory: bool = False) -> Any:
    """Deserialize and close a file of ``encode_to_file``. Tensors are views or pinned copies."""
    data = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    os.close(file)
    return decode((data.pin_memory() if pin_memory else data).numpy())


@cache
def _versions() -> str:
    names = ("recd-plugins-core", "torch", "torchrec")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in names)
    return ", ".join([*versions, f"batches of version {_LAYOUT_VERSION}"])


class _Packing(pickle.Pickler):
    """Pickle and tensors of ``value``, ready to be written as ``size`` bytes."""

    def __init__(self, value: Any) -> None:
        stream = io.BytesIO()
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._tensors: dict[int, tuple[Place, Tensor]] = {}
        self._end = _HEADER.size
        self.dump(value)
        self._structure = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        self.size = self._end + len(self._structure)

    def write(self, data: Tensor) -> None:
        """Write the serialized value into the tensor ``data``, uint8 ``[size]``."""
        _HEADER.pack_into(data.numpy().data, 0, self._end, _versions().encode())
        for place, tensor in self._tensors.values():
            _at(data, place).copy_(tensor)
        data[self._end :] = self._structure

    def persistent_id(self, value: Any) -> Place | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._tensors:
            place = self._end, value.dtype, tuple(value.shape)
            self._tensors[id(value)] = place, value
            self._end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._tensors[id(value)][0]


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

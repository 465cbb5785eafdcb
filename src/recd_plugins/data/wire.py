"""Objects that hold tensors as one piece of bytes, for readers on other machines.

A buffer starts with a header, then tensors stand at multiples of 64 bytes, then the pickle of what
holds them. Like everything that processes of one training run pickle, it is for their connections
only: never decode what comes from elsewhere.
"""

from __future__ import annotations

import importlib.metadata
import struct
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recd_plugins.data.packing import Packing, unpack_from
from recd_plugins.errors import DataError, SetupError

#: Of the layout of a buffer; raised when it changes.
WIRE_VERSION = 1

# Magic, version of the layout, bytes of all tensors, bytes of everything, versions of packages.
_HEADER = struct.Struct("<8sQQQ160s")
_MAGIC = b"recdwire"
_START = _HEADER.size  # three times packing.ALIGNMENT: tensors keep theirs
# Of a buffer on arrival: CPUs read the widest scalar from there.
_LEAST_ALIGNMENT = 8


def encode(value: Any) -> np.ndarray:
    """``value`` with a copy of the CPU tensors in it, uint8 ``[bytes]``, whose ``nbytes`` count.

    A tensor that occurs twice is copied once. Blocks, model inputs and batches are such values:
    deduplicated features travel as they are, rows once with their inverse lookup.
    """
    packing = Packing(value)
    size = _START + packing.size
    header = _HEADER.pack(_MAGIC, WIRE_VERSION, packing.end, size, _versions().encode())
    data = torch.empty(size, dtype=torch.uint8)
    data[:_START] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    packing.write(data[_START:])
    return data.numpy()


def decode(buffer: Any) -> Any:
    """The value again; its tensors are views of ``buffer``, which lives as long as they.

    Args:
        buffer: what ``encode`` made, as anything with the buffer protocol (bytes, memoryview, numpy
            array). Where it does not start at a multiple of 8 bytes, it is copied once. Tensors of
            a buffer that is read-only are to be read only.

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
    return unpack_from(_tensor(buffer)[_START:], end)


def _tensor(buffer: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        data = torch.frombuffer(buffer, dtype=torch.uint8)
    return data if data.data_ptr() % _LEAST_ALIGNMENT == 0 else data.clone()


@cache
def _versions() -> str:
    names = ("recd-plugins-core", "torch", "torchrec")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

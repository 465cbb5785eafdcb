"""Objects that hold tensors, handed to another process in one piece of shared memory.

Sent one by one, each tensor would take a file descriptor and a connection to fetch it with. Here
all of them stand in one tensor of bytes, with the pickle of what holds them at its end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from recd_plugins.data.packing import Packing, unpack_from
from recd_plugins.errors import SetupError


@dataclass(frozen=True)
class Packed:
    """An object as bytes.

    Attributes:
        data: uint8, in shared memory, or pinned.
        end: where the tensors end and the pickle starts.
        seconds: that packing took, and pinning.
    """

    data: Tensor
    end: int
    seconds: float

    def pin_memory(self) -> Self:
        """The same in pinned memory, all tensors at once: each that is unpacked is pinned, too."""
        start = time.perf_counter()
        data = self.data.pin_memory()
        return replace(self, data=data, seconds=self.seconds + time.perf_counter() - start)


def pack(value: Any) -> Packed:
    """``value`` with a copy of the CPU tensors in it; one that occurs twice is copied once.

    Raises:
        SetupError: the machine has too little shared memory.
    """
    start = time.perf_counter()
    packing = Packing(value)
    data = _shared(packing.size)
    packing.write(data)
    return Packed(data, packing.end, time.perf_counter() - start)


def unpack(packed: Packed) -> Any:
    """The object again; its tensors are views of ``packed.data``, which lives as long as they."""
    return unpack_from(packed.data, packed.end)


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

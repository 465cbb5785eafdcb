"""Memory that a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Saved:
    """Bytes of the tensors that autograd saved.

    Attributes:
        num_bytes: a storage that several operations saved counts once.
    """

    def __init__(self) -> None:
        self.num_bytes = 0


@contextmanager
def counting_saved(parameters: Iterable[Tensor]) -> Iterator[Saved]:
    """Count what is saved for the backward pass in this context, but for ``parameters``."""
    saved = Saved()
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved.num_bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved

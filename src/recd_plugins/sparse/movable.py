"""Base class of objects whose tensors move between devices together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node
from torchrec.streamable import Pipelineable


class Movable(Pipelineable):
    """Object whose tensors move to a device together.

    ``TENSORS`` are the names of the attributes that are a tensor or None.
    """

    TENSORS: ClassVar[tuple[str, ...]]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return a copy on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Do not reuse the memory before ``stream`` has finished its current work."""
        for name in self.TENSORS:
            if (tensor := getattr(self, name)) is not None:
                tensor.record_stream(stream)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        moved = copy.copy(self)
        for name in self.TENSORS:
            if (tensor := getattr(self, name)) is not None:
                object.__setattr__(moved, name, function(tensor))
        return moved


def register_pytree(cls: type, leaves: Sequence[str], context: Sequence[str]) -> None:
    """Register a class with torch, so that functions on pytrees see the tensors in ``leaves``."""

    def flatten(value: Any) -> tuple[list[Any], list[Any]]:
        return [getattr(value, name) for name in leaves], [getattr(value, n) for n in context]

    def unflatten(tensors: Any, kept: Any) -> Any:
        # No checks: leaves may be any objects, for example shapes after tree_map.
        value: Any = object.__new__(cls)
        vars(value).update(zip((*leaves, *context), (*tensors, *kept), strict=True))
        return value

    name = f"recd_plugins.{cls.__name__}"
    register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)

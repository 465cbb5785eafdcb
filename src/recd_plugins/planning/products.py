"""A pass over a model that leaves matrix products out, where only shapes matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from recd_plugins.values.stages import stage_of

T = TypeVar("T")


def without_products(run: Callable[[], T]) -> T:
    """The result of ``run`` under ``ProductsAsZeros``; what fails so is run as it is.

    A product of shapes that do not fit then says so in its own words, amid the model's code.
    """
    try:
        with ProductsAsZeros():
            return run()
    except RuntimeError:
        return run()


class ProductsAsZeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has torch's matrix products and attention give zeros, of the shape that they have.

    They are most of the time of a pass of a large model, and what is counted of it, operations and
    bytes, follows from shapes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func.namespace != "aten" or schema.is_mutable or stage_of(schema.name) != "gemm":
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _without_values, (args, kwargs))
        return tree_map_only(Tensor, _zeros, func(*args, **kwargs))


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _zeros(shaped: Tensor) -> Tensor:
    return torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype).zero_()

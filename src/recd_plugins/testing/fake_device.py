"""A torch device that computes on the CPU but, like CUDA, rejects CPU tensors as operands.

Finds missing ``device=`` arguments and conversions to numpy on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["fake_device"]

_NAME = "fake_device"
#: Operators that accept tensors of two devices on CUDA, too: copies, and indices from the CPU.
MIXED = {
    *("aten::copy_", "aten::_to_copy", "aten::index"),
    *("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
}


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Register the fake device. Use as a context, which yields the ``torch.device``.

    Within the context, operators that mix its tensors with CPU tensors raise RuntimeError. Use it
    in a new process, such as ``launch(check, 1)``, because torch does not support autograd on a
    device that is registered after a backward pass. FBGEMM's CUDA kernels do not run on this
    device, and it has no streams or generators.

    Example::

        with fake_device() as device:
            model.to(device)
    """
    register()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # for torch.tensor(values, device=...)
    try:
        with _Factories():  # type: ignore[no-untyped-call]
            yield torch.device(_NAME, 0)
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class OnDevice(Tensor):
    """A tensor on the fake device. ``stored`` is a CPU tensor with the values."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=stored.dtype,
            device=torch.device(_NAME, 0),
            requires_grad=stored.requires_grad,
        )
        made.stored = stored.detach()
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.stored}, device={self.device}"

    def tolist(self) -> Any:
        return self.stored.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that creates tensors on the fake device if ``device=`` names it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_fake(kwargs.get("device")):
            return _computed(func, args, kwargs)
        return func(*args, **kwargs)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    # A tensor without dimensions is a number to CUDA's kernels.
    strange = [each for each in tensors if each.dim() and not isinstance(each, OnDevice)]
    if strange and len(strange) < len(tensors) and func._schema.name not in MIXED:
        raise RuntimeError(
            f"{func} got tensors on {_NAME}:0, and tensors on {strange[0].device} of shapes "
            f"{[tuple(each.shape) for each in strange]}. Move all tensors to one device."
        )
    device = kwargs.get("device")
    inner = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    result = func(*tree_map(_stored, args), **tree_map(_stored, inner))
    if device is not None and not _is_fake(device):
        return result
    placed = tree_map(_put, result)
    return return_and_correct_aliasing(func, args, kwargs, placed)  # type: ignore[no-untyped-call]


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, OnDevice) else value


def _put(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, Tensor) else value


def _is_fake(device: Any) -> bool:
    return device is not None and torch.device(device).type == _NAME


@cache
def register() -> None:
    """Register the device. Cached, because torch supports one Python device per process."""
    setup: Callable[..., None] = backend_registration._setup_privateuseone_for_python_backend
    setup(_NAME, backend_module=_Unavailable())


class _Unavailable(backend_registration._DummyBackendModule):
    """Backend module that reports no available device, so that other code does not choose it."""

    def is_available(self) -> bool:
        return False

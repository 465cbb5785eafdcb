"""A device that computes on the CPU and mixes with it no more than a CUDA device does.

What forgets ``device=``, or reads a tensor as numpy, works on the CPU and fails on the first
accelerator. On this device it fails on any machine.
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
#: What takes tensors of two devices on CUDA too: copies, and indices from the CPU.
_MIXED = {
    *("aten::copy_", "aten::_to_copy", "aten::index"),
    *("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
}


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """The device, while it can be named: ``with fake_device() as device: model.to(device)``.

    In a process of its own, as ``launch(check, 1)`` gives one: a backward pass before it keeps
    torch from any on it. Its type is neither ``cpu`` nor ``cuda``: kernels that are chosen for CUDA
    alone, as those of FBGEMM's tables, are not reached. It has no streams and no generators.

    Raises:
        RuntimeError: in the code within: tensors of the CPU and of the device meet.
    """
    _register()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(values, device=...) comes by copy
    try:
        with _Factories():  # type: ignore[no-untyped-call]
            yield torch.device(_NAME, 0)
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _OnDevice(Tensor):
    """A tensor of the device.

    Args:
        stored: its values, on the CPU.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> _OnDevice:
        made: _OnDevice = Tensor._make_wrapper_subclass(
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
        """The values, as of any device."""
        return self.stored.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors of the device where it is named; all else is as without it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_fake(kwargs.get("device")):
            return _computed(func, args, kwargs)
        return func(*args, **kwargs)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    # A tensor of no dimension is a number to CUDA's kernels.
    strange = [each for each in tensors if each.dim() and not isinstance(each, _OnDevice)]
    if strange and len(strange) < len(tensors) and func._schema.name not in _MIXED:
        raise RuntimeError(
            f"{func} has tensors of {strange[0].device} and of {_NAME}:0: "
            f"{[tuple(each.shape) for each in strange]} are of the former"
        )
    device = kwargs.get("device")
    inner = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    result = func(*tree_map(_stored, args), **tree_map(_stored, inner))
    if device is not None and not _is_fake(device):
        return result
    placed = tree_map(_put, result)
    return return_and_correct_aliasing(func, args, kwargs, placed)  # type: ignore[no-untyped-call]


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, _OnDevice) else value


def _put(value: Any) -> Any:
    return _OnDevice(value) if isinstance(value, Tensor) else value


def _is_fake(device: Any) -> bool:
    return device is not None and torch.device(device).type == _NAME


@cache
def _register() -> None:
    """Once a process: torch knows one device that is made in Python."""
    setup: Callable[..., None] = backend_registration._setup_privateuseone_for_python_backend
    setup(_NAME, backend_module=_Unavailable())


class _Unavailable(backend_registration._DummyBackendModule):
    """Keeps code that looks for any accelerator from taking this one."""

    def is_available(self) -> bool:
        return False

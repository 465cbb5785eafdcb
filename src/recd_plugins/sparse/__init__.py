"""Jagged tensors that store duplicate rows once, and functions that find duplicate rows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
    from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

__all__ = ["InverseKeyedJaggedTensor", "PartialInverseKeyedJaggedTensor"]

# Imported at first use, since duplicate detection does not need torch.
_MODULES = {
    "InverseKeyedJaggedTensor": "ikjt",
    "PartialInverseKeyedJaggedTensor": "partial_ikjt",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

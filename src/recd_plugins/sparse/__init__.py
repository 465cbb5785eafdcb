"""Jagged tensors without duplicate rows, and how duplicates are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor

__all__ = ["InverseKeyedJaggedTensor"]


def __getattr__(name: str) -> Any:
    # At first use: duplicates are also looked for where torch is not wanted.
    if name == "InverseKeyedJaggedTensor":
        from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor

        return InverseKeyedJaggedTensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

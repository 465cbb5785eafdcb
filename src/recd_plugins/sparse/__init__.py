"""Jagged tensors without duplicate rows, and how duplicates are found."""

from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor

__all__ = ["InverseKeyedJaggedTensor"]

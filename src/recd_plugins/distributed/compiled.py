"""Sharded modules under torch.compile on CPU."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
#: Of the set with torch 2.11 tables that are compiled never learn, and TorchRec says nothing.
_LOSES_GRADIENTS = torch.__version__.startswith("2.11.")


def left_uncompiled(sharded: M, device: torch.device | None) -> M:
    """A sharded module that torch.compile leaves as it is where its tables would not learn."""
    if _LOSES_GRADIENTS and (device is None or device.type == "cpu"):
        sharded.forward = torch.compiler.disable(sharded.forward)  # type: ignore[no-untyped-call]
    return sharded

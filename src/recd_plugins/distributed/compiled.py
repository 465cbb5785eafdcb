"""Sharded modules under torch.compile on CPU."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
#: Of the set with torch 2.11 tables that are compiled never learn, and TorchRec says nothing.
_LOSES_GRADIENTS = torch.__version__.startswith("2.11.")


def left_uncompiled(sharded: M, device: torch.device | None) -> M:
    """A sharded module that torch.compile leaves as it is where it could not train compiled.

    TorchRec's awaitables turn what coalesced tables return back into bags as they are waited for,
    and compiled code unpacks them too early.
    """
    coalesces = any(getattr(each, "coalesced_groups", None) for each in sharded.modules())
    if coalesces or (_LOSES_GRADIENTS and (device is None or device.type == "cpu")):
        sharded.forward = torch.compiler.disable(sharded.forward)  # type: ignore[no-untyped-call]
    return sharded

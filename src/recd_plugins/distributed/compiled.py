"""Sharded modules under torch.compile."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
_REASON = "recd-plugins leaves sharded modules uncompiled: docs/exactness.md"


def left_uncompiled(sharded: M) -> M:
    """A sharded module that torch.compile leaves as it is, in a model that it compiles.

    Compiled with torch 2.11, its tables never learn on CPU. With any, deduplicated batches of
    row-wise tables, coalesced and cached tables fail in TorchRec's assertions or in tracing.
    """
    sharded.forward = torch.compiler.disable(sharded.forward, reason=_REASON)  # type: ignore[no-untyped-call]
    return sharded

"""Sharded modules under torch.compile on CPU."""

from __future__ import annotations

from typing import Any

import torch

#: Of the set with torch 2.11 tables that are compiled never learn, and TorchRec says nothing.
_LOSES_GRADIENTS = torch.__version__.startswith("2.11.")


class Uncompiled:
    """A sharded module that torch.compile leaves as it is where its tables would not learn."""

    _on_cpu: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class."""
        forward = super().forward  # type: ignore[misc]
        if _LOSES_GRADIENTS and self._on_cpu:
            return _as_it_is(forward, *args, **kwargs)
        return forward(*args, **kwargs)


@torch.compiler.disable
def _as_it_is(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)

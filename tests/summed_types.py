"""In which types gradients of rows are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SummedTypes(TorchDispatchMode):
    """Notes them in ``types``.

    torch's kernels for CPU sum halves in float32 by themselves. Those for CUDA do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "index_add" in str(function):
            self.types.add(args[0].dtype)
        return function(*args, **(kwargs or {}))

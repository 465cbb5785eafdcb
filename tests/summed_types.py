"""Recording of the dtypes in which gradients of rows are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SummedTypes(TorchDispatchMode):
    """Records them; torch's CPU kernels sum halves in float32, its CUDA kernels do not."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "index_add" in str(function):
            self.types.add(args[0].dtype)
        return function(*args, **(kwargs or {}))

"""Sets the gradients of many parameters in one backward function instead of one per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def allow(parameters: Iterable[Tensor]) -> None:
    """Allow ``store`` for parameters without DDP, unless an optimizer runs in the backward pass."""
    for each in parameters:
        if not hasattr(each, "_in_backward_optimizers"):
            each.stores_gradient = True  # type: ignore[attr-defined]


def allowed(parameters: Sequence[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Return whether a function of ``inputs`` may omit ``parameters`` from autograd's graph."""
    return (
        any(each.requires_grad for each in inputs)
        and not torch.is_autocast_enabled("cuda")
        and all(hasattr(p, "stores_gradient") and not p._backward_hooks for p in parameters)
    )


def store(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add each gradient except None to its parameter's ``grad``, then call the hooks."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)

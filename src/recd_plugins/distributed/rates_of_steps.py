"""Lookups before a step begins, whose tables learn by the rate of that step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.step_counts import counting, step_counts


class LookupAhead:
    """A lookup of rows for the next step, in place of the module that looks them up.

    FBGEMM's backward pass learns by the rate of the forward pass, and a rate that is set between
    two steps comes after the rows were looked up. They are looked up once more then, when their
    gradients are there; what was sent stays, since it is the same.

    A step is counted when it is learned, not before: a checkpoint may be written between the two,
    and goes on from the one before it.

    Args:
        lookup: of fused kernels.
    """

    def __init__(self, lookup: nn.Module) -> None:
        self._lookup = lookup
        parts: list[Any] = list(lookup.modules())
        self._kernels = [each for each in parts if hasattr(each, "learning_rate_tensor")]
        self._counting = counting(parts)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Rows, as the lookup gives them."""
        self._features, self._rates = features, self._rates_now()
        before = [count.clone() for count in step_counts(self._counting)]
        self._rows = rows = self._lookup(features)
        counts = step_counts(self._counting)
        self._counted = [now - then for now, then in zip(counts, before, strict=True)]
        if not rows.requires_grad:
            return rows
        self._count(-1)
        ahead: Tensor = _Learning.apply(rows.detach().requires_grad_(), self)  # type: ignore[no-untyped-call]
        return ahead

    def learn(self, gradients: Tensor) -> None:
        """Have the tables learn from the gradients of the rows."""
        if self._rates_now() == self._rates:
            self._count(1)
        else:  # this counts, too
            with torch.enable_grad():
                self._rows = self._lookup(self._features)
        self._rows.backward(gradients)

    def _rates_now(self) -> list[float]:
        return [float(kernel.learning_rate_tensor) for kernel in self._kernels]

    def _count(self, sign: int) -> None:
        """Count the step, or take it back."""
        for count, counted in zip(step_counts(self._counting), self._counted, strict=True):
            count.add_(counted, alpha=sign)


class _Learning(torch.autograd.Function):
    """Rows, and in the backward pass what they learn."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ahead: LookupAhead) -> Tensor:
        ctx.ahead = ahead
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.ahead.learn(*gradients)
        return None, None

"""Numbers with mean 0 and variance 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from recd_plugin_tables.preprocessing.fitted import FittedPreprocessing

if TYPE_CHECKING:
    from torch import Tensor


class Standardise(FittedPreprocessing):
    """Subtract the mean of the training rows and divide by their standard deviation."""

    name = "tables.standardise"
    scope = "id"
    takes = ("numbers",)

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        import torch

        # Chan, Golub and LeVeque's sum of squares, which large means do not cancel.
        count, mean, squares = 0, 0.0, 0.0
        least, largest = math.inf, -math.inf
        for values, _ in rows:
            if not values.numel():
                continue
            part = values.double()
            num, part_mean = values.numel(), float(part.mean())
            squares += float((part - part_mean).square().sum())
            squares += (part_mean - mean) ** 2 * count * num / (count + num)
            mean += (part_mean - mean) * num / (count + num)
            count += num
            least, largest = min(least, float(part.min())), max(largest, float(part.max()))
        deviation = math.sqrt(squares / count) if count else 0.0
        # A number that never changes becomes 0, whatever rounding left of its deviation.
        constant = least >= largest
        mean = least if count and constant else mean
        self._state = {
            "mean": torch.tensor([mean], dtype=torch.float64),
            "deviation": torch.tensor([1.0 if constant else deviation], dtype=torch.float64),
        }

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = (self.state[name].to(values.device) for name in ("mean", "deviation"))
        return ((values.double() - mean) / deviation).to(values.dtype), offsets

"""Random draws that come from a count of steps: a run that is resumed draws what it would have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# An odd number, so that streams of steps lie far apart.
_STRIDE = 0x4F1BBCDCBFA53E0B


class SteadyDraws(nn.Module):
    """Generators of one place of a model, another one at each step.

    The step is a buffer, so that checkpoints have it. Every rank draws the same.

    Args:
        stream: a number of this place.
    """

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream = stream
        self.step: Tensor
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def next(self, device: torch.device) -> torch.Generator:
        """The generator of the step that follows; evaluation does not count."""
        generator = torch.Generator(device)
        generator.manual_seed((int(self.step) * _STRIDE + self._stream) % (1 << 63))
        if self.training:
            self.step += 1
        return generator


class SteadyDropout(nn.Module):
    """Dropout by such draws.

    Args:
        rate: share of values that become 0.
        stream: a number of this place.
    """

    def __init__(self, rate: float, stream: int) -> None:
        super().__init__()
        self._rate = rate
        self._draws = SteadyDraws(stream)

    def forward(self, values: Tensor) -> Tensor:
        if not (self.training and self._rate):
            return values
        generator = self._draws.next(values.device)
        drawn = torch.rand(values.shape, device=values.device, generator=generator)
        return values * (drawn >= self._rate) / (1 - self._rate)

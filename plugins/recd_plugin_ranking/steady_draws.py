"""Random draws by seed and step: a run that is resumed draws what it would have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Odd numbers, so that streams of steps, and the steps of seeds, lie far apart.
_STRIDE, _SEED_STRIDE = 0x4F1BBCDCBFA53E0B, 0x1E3779B97F4A7C15


class SteadyDraws(nn.Module):
    """Generators of one place of a model, another one at each step.

    The step is a buffer, so that checkpoints have it. It counts from a number of torch's seed, by
    which the model is made. Every rank draws the same.

    Args:
        stream: a number of this place.
    """

    def __init__(self, stream: int) -> None:
        super().__init__()
        self._stream = stream
        self.step: Tensor
        first = torch.initial_seed() * _SEED_STRIDE % (1 << 62)
        self.register_buffer("step", torch.tensor(first, dtype=torch.int64))

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

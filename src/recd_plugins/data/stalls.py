"""Data stalls: how long the trainer waits for batches, and why (arXiv 2108.09373, section 3.2).

Each batch has its :class:`MakingTimes`, the seconds to produce the batch. A batch that is produced
while the trainer computes causes no stall. The causes are the reader stages in RecD's figure 10,
and the transfer from the reader to the trainer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch

from recd_plugins.interfaces.batch import STALL_CAUSES, MakingTimes
from recd_plugins.runtime.machine import Clock, clock_of

#: Default target for the trainer's waiting share of time.
STALL_TARGET = 0.05


M = TypeVar("M")


@dataclass(frozen=True)
class Stalls:
    """Mean time per step that the trainer waits for batches.

    Attributes:
        step_seconds: wall time of a step, including waits.
        seconds: maps each cause in ``STALL_CAUSES`` to the waiting time per step.
        making: mean time to produce a batch.
    """

    steps: int
    step_seconds: float
    seconds: Mapping[str, float]
    making: MakingTimes

    @property
    def share(self) -> float:
        """Fraction of the step time that the trainer waits for batches, 0 to 1."""
        return sum(self.shares().values())

    def shares(self) -> dict[str, float]:
        """Return a dict from cause of waiting to its fraction of the step time."""
        step = self.step_seconds or math.inf
        return {cause: seconds / step for cause, seconds in self.seconds.items()}

    @property
    def training_seconds(self) -> float:
        """Seconds per step, without waiting for batches."""
        return self.step_seconds - sum(self.seconds.values())


class StallTotals:
    """Accumulates the data stalls of several steps to compute the mean."""

    def __init__(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._waits = [0.0] * len(STALL_CAUSES)
        self._making = [0.0] * len(astuple(MakingTimes()))

    def add(self, seconds: float, wait: Sequence[float], making: MakingTimes) -> None:
        """Add one step: its wall time, the wait per cause, and the time to produce its batch."""
        self._steps += 1
        self._seconds += seconds
        self._waits = [*map(sum, zip(self._waits, wait, strict=True))]
        self._making = [*map(sum, zip(self._making, astuple(making), strict=True))]

    def mean(self) -> Stalls | None:
        """Return the mean of the added steps; None without steps."""
        if not (steps := self._steps):
            return None
        waits = [total / steps for total in self._waits]
        making = MakingTimes(*(total / steps for total in self._making))
        by_cause = dict(zip(STALL_CAUSES, waits, strict=True))
        return Stalls(steps, self._seconds / steps, by_cause, making)


@dataclass(frozen=True, slots=True)
class Wait:
    """Start and end of the trainer's wait for one batch, as time stamps of the meter's clock."""

    start: Any
    end: Any
    making: MakingTimes

    def by_cause(self, clock: Clock) -> tuple[float, ...]:
        """Return the waiting seconds of each cause, in the order of ``STALL_CAUSES``."""
        return self.making.causes_of(clock.seconds(self.start, self.end))


class StallMeter:
    """Measures how long a training loop waits for batches.

    Wrap it around the trainer's batch iterator::

        stalls = StallMeter()
        for batch in stalls.metered(loader):
            train(batch)
            print(stalls.recent().share)

    On CUDA, a wait is the time in which the ``device`` was idle. ``recent`` averages over the
    latest ``window`` steps. ``taken`` is the number of batches yielded, and ``newest`` the wait for
    the latest batch.
    """

    def __init__(self, device: torch.device | None = None, window: int = 32) -> None:
        self.clock = clock_of(device)
        self.taken = 0
        self.newest: Wait | None = None
        self._window: deque[tuple[float, Wait]] = deque(maxlen=window)

    def metered(self, batches: Iterable[M]) -> Generator[M, None, None]:
        """Yield the batches unchanged, and measure the wait for each batch.

        Each batch must have an attribute ``making`` of type ``MakingTimes``.
        """
        handed_out: float | None = None
        start = self.clock.mark()
        for batch in batches:
            now = time.perf_counter()
            making: MakingTimes = batch.making  # type: ignore[attr-defined]
            self.newest = Wait(start, self.clock.mark(), making)
            self.taken += 1
            if handed_out is not None:
                self._window.append((now - handed_out, self.newest))
            handed_out = now
            yield batch
            start = self.clock.mark()

    def recent(self) -> Stalls | None:
        """Return the mean stalls of the latest ``window`` steps; None before the second batch.

        On CUDA, this synchronizes the device.
        """
        totals = StallTotals()
        for seconds, wait in self._window:
            totals.add(seconds, wait.by_cause(self.clock), wait.making)
        return totals.mean()


@dataclass(frozen=True)
class Pace:
    """Mean seconds per batch in a reader process and in the training process.

    Attributes:
        making: time in which one reader produces a batch.
        training: time of a training step without waiting for the batch.
        arrival: time in which the training process unpacks and pins a batch.
    """

    making: float
    training: float
    arrival: float = 0.0

    @property
    def taking(self) -> float:
        """Seconds in which the training process unpacks a ready batch and trains a step."""
        return self.training + self.arrival

    def stall_share(self, readers: int) -> float:
        """Return the estimated fraction of time, 0 to 1, that the trainer waits for batches."""
        step = max(self.taking, self.making / readers) if readers else self.taking + self.making
        return 1 - self.training / step if step else 0.0

    def readers_for(self, target: float) -> int | None:
        """Return how many readers limit the waiting fraction to ``target``, at least 1.

        Return None if unpacking in the training process already exceeds ``target``.
        """
        if self.arrival > target * self.taking or not self.training:
            return None
        return max(1, math.ceil((1 - target) * self.making / self.training - 1e-9))

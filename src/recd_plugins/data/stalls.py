"""How long the trainer waits for data, and for what.

A batch brings along how long the process that made it was busy with which part
(:class:`MakingTimes`). :class:`StallMeter` measures what the trainer waits for each batch, and says
by these times what it waited for. Only waiting counts: what a thread or another process makes while
the trainer trains costs it nothing (arXiv 2108.09373, section 3.2, calls the rest data stalls; the
causes are those of RecD's figure 10, and the way from the reader to the trainer).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch

from recd_plugins.clock import Clock, clock_of
from recd_plugins.values.model_input import STALL_CAUSES, MakingTimes

_MAKING = tuple(field.name for field in fields(MakingTimes))


class Made(Protocol):
    """What brings its making times along, such as a ``ModelInput``."""

    @property
    def making(self) -> MakingTimes:
        """Seconds that it took."""


M = TypeVar("M", bound=Made)


@dataclass(frozen=True)
class Stalls:
    """What the trainer waited for data, a mean over steps.

    Attributes:
        steps: that were counted, each with one batch taken.
        step_seconds: wall time of a step, waiting included.
        seconds: that a step waited, by cause, in the order of ``STALL_CAUSES``.
        making: of a batch.
        making_deviation: standard deviation of ``making.reader``, seconds.
        training_deviation: of a step without waiting.
    """

    steps: int
    step_seconds: float
    seconds: Mapping[str, float]
    making: MakingTimes
    making_deviation: float
    training_deviation: float

    @property
    def share(self) -> float:
        """The waiting share of a step, 0 to 1."""
        return sum(self.shares().values())

    def shares(self) -> dict[str, float]:
        """The waiting shares of a step, by cause."""
        return {
            cause: seconds / self.step_seconds if self.step_seconds else 0.0
            for cause, seconds in self.seconds.items()
        }

    @property
    def training_seconds(self) -> float:
        """Seconds of a step without waiting."""
        return self.step_seconds - sum(self.seconds.values())


class StallTotals:
    """Adds up steps: their number and sums, whatever their number."""

    def __init__(self) -> None:
        self._steps = 0
        # Seconds waited by cause, making times, then training and reading, and their squares.
        self._sums = [0.0] * (len(STALL_CAUSES) + len(_MAKING) + 4)

    def add(self, seconds: float, wait: Sequence[float], making: MakingTimes) -> None:
        """One step.

        Args:
            seconds: of the step, waiting included.
            wait: seconds waited in it, in the order of ``STALL_CAUSES``.
            making: of the batch that was taken in it.
        """
        training, reading = seconds - sum(wait), making.reader
        values = *wait, *(getattr(making, part) for part in _MAKING), training, reading
        for place, value in enumerate((*values, training**2, reading**2)):
            self._sums[place] += value
        self._steps += 1

    def mean(self) -> Stalls | None:
        """The mean of all steps so far; None without any."""
        if not self._steps:
            return None
        means = [total / self._steps for total in self._sums]
        waits, making = means[: len(STALL_CAUSES)], means[len(STALL_CAUSES) : -4]
        training, reading, training_square, reading_square = means[-4:]
        return Stalls(
            self._steps,
            training + sum(waits),
            dict(zip(STALL_CAUSES, waits, strict=True)),
            MakingTimes(*making),
            max(0.0, reading_square - reading**2) ** 0.5,
            max(0.0, training_square - training**2) ** 0.5,
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """The trainer took one batch.

    Attributes:
        start, end: moments of the meter's clock.
        making: of the batch.
    """

    start: Any
    end: Any
    making: MakingTimes

    def by_cause(self, clock: Clock) -> tuple[float, ...]:
        """Seconds in the order of ``STALL_CAUSES``."""
        return self.making.causes_of(clock.seconds(self.start, self.end))


class StallMeter:
    """Measures the time inside ``next`` of batches that it passes on.

    Wrap it around what the trainer takes batches from::

        stalls = StallMeter()
        for batch in stalls.metered(loader):
            train(batch)
            print(stalls.recent().share)

    A *turn* is from one batch handed out to the next: training on the one, and waiting for the
    next. In a steady state a train pipeline takes one batch in a step, so that turns are steps.

    Args:
        device: of the trainer. On CUDA a wait is the time for which the device had nothing to do:
            while it works on what it was asked before, the host may wait at no cost.
        window: turns that ``recent`` looks at.

    Attributes:
        taken: batches that were handed out.
        newest: the wait for the last one; None before the first.
    """

    def __init__(self, device: torch.device | None = None, window: int = 32) -> None:
        self.clock = clock_of(device)
        self.taken = 0
        self.newest: Wait | None = None
        self._window: deque[tuple[float, Wait]] = deque(maxlen=window)

    def metered(self, batches: Iterable[M]) -> Generator[M, None, None]:
        """The same batches."""
        iterator = iter(batches)
        handed_out: float | None = None
        while True:
            start = self.clock.mark()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            now = time.perf_counter()
            self.newest = Wait(start, self.clock.mark(), batch.making)
            self.taken += 1
            if handed_out is not None:
                self._window.append((now - handed_out, self.newest))
            handed_out = now
            yield batch

    def recent(self) -> Stalls | None:
        """The stalls of the last turns, without the wait for the first batch.

        None before the second batch. On CUDA it waits for the device.
        """
        totals = StallTotals()
        for seconds, wait in self._window:
            totals.add(seconds, wait.by_cause(self.clock), wait.making)
        return totals.mean()

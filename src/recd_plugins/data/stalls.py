"""How long the trainer waits for data, and for what.

A batch brings along how long the process that made it was busy with which part
(:class:`MakingTimes`). :class:`StallMeter` measures what the trainer waits for each batch, and says
by these times what it waited for. Only waiting counts: what a thread or another process makes while
the trainer trains costs it nothing (arXiv 2108.09373, section 3.2, calls the rest data stalls; the
causes are those of RecD's figure 10, and the way from the reader to the trainer).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from recd_plugins.interfaces.batch import STALL_CAUSES, MakingTimes
from recd_plugins.runtime.machine import Clock, clock_of

#: Of its time, what a trainer may wait unless someone says otherwise.
STALL_TARGET = 0.05
#: Readers of a rank beyond which nobody looks.
MOST_READERS = 1024
# Blocks whose waits are added up; those before them fill the readers' buffers.
_BLOCKS = 8192
# Of a mean; a smaller deviation is none.
_LEAST_SPREAD = 1e-3
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
        """One step."""
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


@dataclass(frozen=True)
class Pace:
    """Seconds a batch of one reader and of the trainer, each with its standard deviation.

    Attributes:
        making: of a reader, until the batch is ready to be taken.
        training: of a step on a batch that is there.
        arrival: of the trainer's process, to unpack and pin a batch: it waits as long at the least.
        block: adjacent batches that a reader makes at a time.
        blocks_ahead: blocks that a reader makes before the trainer has taken the one before.
    """

    making: float
    training: float
    making_deviation: float = 0.0
    training_deviation: float = 0.0
    arrival: float = 0.0
    block: float = 1.0
    blocks_ahead: int = 0

    @property
    def taking(self) -> float:
        """Seconds of the trainer's process for a batch that is ready."""
        return self.training + self.arrival

    def stall_share(self, readers: int) -> float:
        """The share of time that the trainer waits for data, 0 to 1; 0 readers: it reads itself."""
        if readers == 0:
            own = self.making + self.arrival
            return own / (own + self.training) if own else 0.0
        waited, total = self._follow(readers)
        return waited / total if total else 0.0

    def readers_for(self, target: float) -> int | None:
        """The fewest readers, 1 or more, with which the trainer waits at most ``target``.

        None where no number does: unpacking alone takes longer, or more than ``MOST_READERS`` are
        needed.
        """
        if self.arrival > target * self.taking:
            return None
        # Fewer do not suffice even where every batch takes the same time.
        least = (1 - target) * self.making / self.taking if self.taking else MOST_READERS + 1
        readers = max(1, math.ceil(least - 1e-9))
        while readers <= MOST_READERS:
            if self.stall_share(readers) <= target:
                return readers
            more = readers + 1 + readers // 32
            readers = more if readers == MOST_READERS else min(more, MOST_READERS)
        return None

    def _follow(self, readers: int) -> tuple[float, float]:
        """Seconds waited, and all seconds, of ``_BLOCKS`` blocks."""
        ahead = readers * (1 + self.blocks_ahead)
        filling = 2 * ahead
        generator = np.random.default_rng(0)
        count = filling + _BLOCKS
        making = _gamma(generator, self.making, self.making_deviation, self.block, count)
        training = _gamma(generator, self.training, self.training_deviation, self.block, count)
        waited, total = _follow_blocks(
            making, training, self.arrival * self.block, readers, ahead, filling
        )
        return float(waited), float(total)


@njit(cache=True)
def _follow_blocks(
    making: NDArray[np.float64],
    training: NDArray[np.float64],
    unpacking: float,
    readers: int,
    ahead: int,
    filling: int,
) -> tuple[float, float]:
    """Seconds waited, and all seconds, of the blocks from ``filling`` on."""
    count = len(making)
    ready, taken = np.zeros(count), np.zeros(count)
    now = waited = begin = 0.0
    for number in range(count):
        if number == filling:
            waited, begin = 0.0, now
        start = ready[number - readers] if number >= readers else 0.0
        if number >= ahead:
            start = max(start, taken[number - ahead])
        ready[number] = start + making[number]
        taken[number] = max(now, ready[number])
        waited += taken[number] - now + unpacking
        now = taken[number] + unpacking + training[number]
    return waited, now - begin


def _gamma(
    generator: np.random.Generator, mean: float, deviation: float, block: float, count: int
) -> NDArray[np.float64]:
    """Seconds of ``count`` blocks of independent batches."""
    if deviation <= _LEAST_SPREAD * mean:
        return np.full(count, mean * block)
    shape = (mean / deviation) ** 2
    drawn = generator.gamma(shape * block, mean / shape, count)
    # The mean matters most: it is what was measured, not what was drawn.
    return drawn * (mean * block / drawn.mean())

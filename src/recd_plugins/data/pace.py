"""The share of its time that a trainer waits for N readers, and the fewest that keep it small.

A rank's readers take turns with blocks of adjacent batches, and the trainer takes the blocks in
order. A reader begins its next block when the trainer takes the one before of it, or, where it may
be ahead by more blocks, so much earlier. With X_k the time in which block k is made and S_k the
time in which it is trained on, block k is ready and taken at

    ready_k = max(ready_(k-N), taken_(k-N(1+ahead))) + X_k,
    taken_k = max(taken_(k-1) + S_(k-1), ready_k),

and the trainer waits taken_k - taken_(k-1) - S_(k-1). Without variance this is what utilisation
says: a batch that takes m to make and s to train on needs N = m / s readers, and with fewer the
trainer waits 1 - N s / m of its time. With variance it takes more, as blocks come in order and a
slow one holds up those behind it; how many more no short formula says for every number of readers,
so the recurrence is followed for some thousand blocks with times drawn from gamma distributions of
the measured means and deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

#: Of its time, what a trainer may wait unless someone says otherwise.
STALL_TARGET = 0.05
#: Readers of a rank beyond which nobody looks.
MOST_READERS = 1024
# Blocks whose waits are added up; those before them fill the readers' buffers.
_BLOCKS = 8192
# Of a mean; a smaller deviation is none.
_LEAST_SPREAD = 1e-3


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

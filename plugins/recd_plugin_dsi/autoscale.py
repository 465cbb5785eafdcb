"""How many readers a rank takes, from what its trainer waits (arXiv 2108.09373, section 3.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from recd_plugins.api import ModelInput, StallMeter

# Readers that are left over are taken away when waits are far below the target.
_FAR_BELOW = 0.25
# Of the readers that a rank takes: so many more are kept, before one is taken away.
_MARGIN = 1.25


@dataclass
class Window:
    """What was measured since the number of readers changed last.

    Attributes:
        steps: batches that were taken.
        seconds: wall time of these steps.
        waited: seconds of it that the trainer waited.
        making: seconds that readers were busy with these batches.
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    making: float = 0.0

    @property
    def share(self) -> float:
        """The share of its time that the trainer waited."""
        return self.waited / self.seconds if self.seconds else 0.0

    def add(self, seconds: float, waited: float, making: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.waited += waited
        self.making += making


def wanted(window: Window, readers: int, bounds: tuple[int, int], target: float) -> int:
    """How many readers there should be, within bounds.

    A trainer that never waited would take its batches in ``seconds - waited``; ``making / busy``
    readers keep up with it. While it waits too long there is at least one more, and at most twice
    as many; readers that wait for it go one by one.
    """
    low, high = bounds
    busy = max(window.seconds - window.waited, 1e-9)
    if window.share > target:
        enough = math.ceil(window.making / busy)
        return min(high, max(readers + 1, min(enough, 2 * readers)))
    needed = math.ceil(_MARGIN * window.making / busy)
    if window.share < _FAR_BELOW * target and needed < readers:
        return max(low, readers - 1)
    return readers


class Waits:
    """Measures what the trainer waits for batches.

    Attributes:
        window: of the steps since it was put there.
    """

    def __init__(self) -> None:
        self.window = Window()
        self._meter = StallMeter()

    def measured(self, batches: Iterator[ModelInput]) -> Iterator[ModelInput]:
        """The same batches."""
        handed_out: float | None = None
        for batch in self._meter.metered(batches):
            newest = self._meter.newest
            assert newest is not None, "a batch was handed out"
            now = time.perf_counter()
            if handed_out is not None:
                waited = self._meter.clock.seconds(newest.start, newest.end)
                self.window.add(now - handed_out, waited, batch.making.reader)
            handed_out = now
            yield batch

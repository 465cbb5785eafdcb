"""How often a thing is done to know how long it takes, and how far the times lie apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from recd_plugins.api import doing

#: Rounds of one thing at least.
LEAST_ROUNDS = 3


# Turns of steps that follow one another, and seconds of one at least. Of some 7 rounds with a
# barrier before each, a collective came to 2.9 to 7.0 ms from start to start, 4 ranks of 2 cores.
_TURNS, _TURN_SECONDS = 3, 0.3
# Up to so many bytes latency is most of what a collective takes.
_LATENCY_BYTES = 1 << 16


@dataclass(frozen=True)
class Effort:
    """How long a cluster is measured.

    Attributes:
        sizes: bytes that a rank puts into a collective: latency decides the first, bandwidth the
            last.
        rounds: of one thing at most.
        seconds: for one thing, after which no round follows the first ``LEAST_ROUNDS``.
        most_seconds: a size whose first rounds would take longer is left out.
        partners: nodes, and ranks of its node, that each exchanges with one after the other.
    """

    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    most_seconds: float
    partners: int


#: One or two minutes.
FULL = Effort(tuple(2**n for n in (8, 12, 14, 16, 18, 20, 22, 24)), 15, 2.0, 8.0, 7)
#: 10 to 20 seconds.
QUICK = Effort(tuple(2**n for n in (8, 17, 19, 20, 22)), 15, 0.15, 0.8, 1)


@dataclass(frozen=True)
class MiddleHalf:
    """The median of rounds or ranks, and between what the middle half of them lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of one value or more."""
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        return cls(median, low, high)


def rounds(
    run: Callable[[], object], device: torch.device, effort: Effort
) -> tuple[list[float], list[float]]:
    """Seconds of ``run`` by round: on this rank, and until the slowest was done. Collective."""
    own: list[float] = []
    slowest: list[float] = []
    while len(own) < LEAST_ROUNDS or (len(own) < effort.rounds and sum(slowest) < effort.seconds):
        with doing("measuring", long=False):
            wait_for(device)
            dist.barrier()
            start = time.perf_counter()
            run()
            wait_for(device)
            own.append(time.perf_counter() - start)
            longest = torch.tensor([own[-1]], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        slowest.append(longest.item())
    return own, slowest


def steps_in_a_row(step: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return seconds of a step if ranks go on from one to the next, as in training. Collective."""

    def turn(steps: int) -> float:
        with doing("measuring", long=False):
            wait_for(device)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            wait_for(device)
            ranks = [0.0] * dist.get_world_size()
            dist.all_gather_object(ranks, time.perf_counter() - start)
        return fmean(ranks) / steps

    first = turn(LEAST_ROUNDS)  # the same on all ranks, as all later turns need
    least = max(_TURN_SECONDS, effort.seconds / 2)
    steps = max(LEAST_ROUNDS, round(least / first)) if effort.seconds else LEAST_ROUNDS
    return sorted(turn(steps) for _ in range(_TURNS))[_TURNS // 2]


def goes_on(size: int, last_size: int, last_seconds: float, effort: Effort) -> bool:
    """Whether there is time for a larger size, by what the one before took."""
    if last_size <= _LATENCY_BYTES:
        # Of latency alone no bandwidth can be told, however long ranks waited for one another.
        return True
    return LEAST_ROUNDS * last_seconds * size / last_size <= effort.most_seconds


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

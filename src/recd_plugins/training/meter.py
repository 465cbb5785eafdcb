"""Speed, bytes and ids of training steps, and what they wait for."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from recd_plugins.clock import clock_of
from recd_plugins.data.stalls import StallMeter, Stalls, StallTotals, Wait
from recd_plugins.distributed.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.values.channels import Channel

# Batches that TrainPipelineSparseDist distributes before it trains on them.
_READ_AHEAD = 2
# Steps by which a device may lag behind the host.
_UNREAD = 64


@dataclass(frozen=True)
class StepCounts:
    """What one rank did in one step.

    Attributes:
        sent: bytes by kind of collective.
        sent_by_channel: bytes of those collectives that have a name, by name.
        ids: that entered its lookups.
    """

    sent: dict[str, float]
    sent_by_channel: dict[str, float]
    ids: float


class Meter:
    """Takes steps one by one: the first fills the pipeline, a few are counted, the rest timed.

    Counting slows a step down, so no step is both counted and timed.

    Args:
        model: sharded.
        device: of this rank.
        channels: names of collectives that are counted apart.
        stalls: of the batches that the steps take.
    """

    COUNTED_STEPS = 4

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        channels: Mapping[Channel, str] | None = None,
        stalls: StallMeter | None = None,
    ) -> None:
        self._model = model
        self._channels = channels or {}
        self._clock = clock_of(device)
        self._step = 0
        self._cut_short = self._uncounted = False
        self._bytes = CollectiveBytes()
        self._ids = 0
        # Of timed steps, whose number grows for days: eight bytes of each, and marks of the newest.
        self._seconds = array("d")
        self._spans: deque[tuple[Any, Any]] = deque()
        self._stall_meter = stalls or StallMeter(device)
        self._stalls = StallTotals()
        self._waits: deque[tuple[Any, Any, Wait]] = deque()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one training step."""
        self._step += 1
        if self._step == 1:
            yield
        elif self._step <= 1 + self.COUNTED_STEPS:
            with self._bytes, lookup_ids(self._model) as ids:
                yield
            self._ids += ids.total
        else:
            taken, start = self._stall_meter.taken, self._clock.mark()
            yield
            span = start, self._clock.mark()
            self._spans.append(span)
            self._read_spans(_UNREAD)
            # A pipeline that runs dry takes none, and one that fills anew takes several.
            if self._stall_meter.taken == taken + 1 and self._stall_meter.newest is not None:
                self._waits.append((*span, self._stall_meter.newest))
                self._add_waits(_UNREAD)

    def ran_dry(self) -> None:
        """The pipeline did, and fills anew: counts that it cut short start again, once.

        Where it runs dry too often to count, steps are timed without.
        """
        if self._uncounted or self._step >= 1 + self.COUNTED_STEPS + _READ_AHEAD:
            return
        self._uncounted, self._cut_short = self._cut_short, True
        self._step = 1 + self.COUNTED_STEPS if self._uncounted else 0
        self._ids, self._bytes = 0, CollectiveBytes()

    @property
    def timed_steps(self) -> int:
        """Steps that were timed so far."""
        return len(self._seconds) + len(self._spans)

    def step_seconds(self) -> list[float]:
        """Wall time of each timed step, reading included."""
        self._read_spans(0)
        return self._seconds.tolist()

    def stalls(self) -> Stalls | None:
        """What the timed steps that took a batch waited for it; None without any."""
        self._add_waits(0)
        return self._stalls.mean()

    def _read_spans(self, left: int) -> None:
        """Note the seconds of the oldest; of the newest a device may not know the time yet."""
        while len(self._spans) > left:
            self._seconds.append(self._clock.seconds(*self._spans.popleft()))

    def _add_waits(self, left: int) -> None:
        """Add up the oldest waits, likewise."""
        while len(self._waits) > left:
            start, end, wait = self._waits.popleft()
            seconds = self._clock.seconds(start, end)
            self._stalls.add(seconds, wait.by_cause(self._clock), wait.making)

    def per_step(self) -> StepCounts | None:
        """What this rank did in one step, the mean of those counted.

        None for a run so short that the counted steps ran out of batches to read ahead, or whose
        pipeline always did.
        """
        if self._uncounted or self._step < 1 + self.COUNTED_STEPS + _READ_AHEAD:
            return None
        by_channel = Counter[str]()
        for traffic, num_bytes in self._bytes.sent.items():
            if (name := self._channels.get((traffic.group, traffic.kind))) is not None:
                by_channel[name] += num_bytes
        return StepCounts(
            self._mean(self._bytes.by_kind()),
            self._mean(by_channel),
            self._ids / self.COUNTED_STEPS,
        )

    def _mean(self, totals: Mapping[str, int]) -> dict[str, float]:
        return {name: total / self.COUNTED_STEPS for name, total in totals.items()}


def sum_by_kind(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add up what ranks report."""
    kinds = sorted({kind for rank in per_rank for kind in rank})
    return {kind: sum(rank.get(kind, 0) for rank in per_rank) for kind in kinds}

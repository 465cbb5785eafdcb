"""One step on the link of a node: what its interface carries while ranks compute and wait."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.api.training import PROFILED_STEP, read_profile, stages_over_time

_SECONDS_BETWEEN_SAMPLES = 1e-3
#: What the training thread does when it waits for nobody.
_COMPUTES = ("lookup", "gemm", "other")
#: Of this network namespace.
_COUNTERS = Path("/proc/thread-self/net/dev")


@dataclass(frozen=True)
class LinkTrace:
    """A step of one rank. Times are milliseconds from its start.

    Attributes:
        end: of the step.
        samples: time, and bytes that the link has sent and received until then.
        collectives: that gloo works on: name, from, to.
        thread: what the training thread does: stage, from, to; one after the other.
    """

    end: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    collectives: list[tuple[str, float, float]] = field(default_factory=list)
    thread: list[tuple[str, float, float]] = field(default_factory=list)

    def share(self, start: float, end: float, rate: float) -> tuple[float, float]:
        """What was sent and received of what a link of ``rate`` bytes a second could."""
        before, after = self._at(start), self._at(end)
        could = rate * (end - start) / 1e3
        return (after[0] - before[0]) / could, (after[1] - before[1]) / could

    def lost(self, rate: float) -> dict[str, float]:
        """Milliseconds that the busier direction of the link lost, by what the thread did.

        Together with what its bytes take at the full rate they are the step.
        """
        whole = self.share(0.0, self.end, rate)
        way = whole.index(max(whole))
        found: dict[str, float] = {}
        for stage, start, end in self.thread:
            if end > start:
                unused = (1 - self.share(start, end, rate)[way]) * (end - start)
                found[stage] = found.get(stage, 0.0) + unused
        return found

    def hidden(self) -> float:
        """The share of what the link sends and receives that it carries while the thread computes,
        and waits for no other rank."""
        ends = (0.0, self.end), *((a, b) for stage, a, b in self.thread if stage in _COMPUTES)
        carried = [sum(self.share(start, end, 1.0)) * (end - start) for start, end in ends]
        return sum(carried[1:]) / carried[0] if carried[0] else 0.0

    def _at(self, moment: float) -> tuple[float, float]:
        """Between two samples the link carries evenly."""
        after = bisect_right(self.samples, moment, key=lambda sample: sample[0])
        if after in (0, len(self.samples)):
            _, *nearest = self.samples[min(after, len(self.samples) - 1)]
            return nearest[0], nearest[1]
        (t0, *first), (t1, *second) = self.samples[after - 1], self.samples[after]
        part = (moment - t0) / (t1 - t0)
        sent, received = (a + part * (b - a) for a, b in zip(first, second, strict=True))
        return sent, received


def trace_step(step: Callable[[], None]) -> LinkTrace:
    """Profile one step, and sample the link of this node meanwhile. A collective call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, _sampled() as samples:
        dist.barrier()
        with record_function(PROFILED_STEP):
            step()
    events = read_profile(profiler, torch.device("cpu"))
    first = events.step.start

    def ms(moment: int) -> float:
        return (moment - first) / 1e6

    return LinkTrace(
        ms(events.step.end),
        [(ms(moment), sent, received) for moment, sent, received in samples],
        [
            (span.name.removeprefix("gloo:"), ms(span.start), ms(span.end))
            for span in events.in_flight
            if span.end > first
        ],
        [(stage, ms(start), ms(end)) for start, end, stage in stages_over_time(events)],
    )


@contextmanager
def _sampled() -> Iterator[list[tuple[int, int, int]]]:
    """Time and counters about each millisecond, where this node has a link."""
    samples: list[tuple[int, int, int]] = []
    ended = threading.Event()

    def sample() -> None:
        while True:
            moment = time.time_ns()  # the profiler's clock
            samples.append((moment, *_counters()))
            if ended.wait(_SECONDS_BETWEEN_SAMPLES):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _counters() -> tuple[int, int]:
    """Bytes that gloo's interface has sent and received; none where it was not named one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    for line in _COUNTERS.read_text(encoding="ascii").splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            values = numbers.split()
            return int(values[8]), int(values[0])
    return 0, 0

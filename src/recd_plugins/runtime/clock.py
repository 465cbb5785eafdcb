"""Time of work, on the host or on a device that works on after a call returned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Clock:
    """Wall time of work that is done when a call returns."""

    def mark(self) -> Any:
        """A moment."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments."""
        return float(end - start)


class CudaClock(Clock):
    """Time on the device, whose work goes on after a call returns; asking waits for it.

    A mark is the moment at which the device has done what was asked of it before, on the stream
    that trains: a train pipeline takes batches on another one, which waits for nothing. Between two
    marks around work of the host alone lies the time for which the device had nothing to do.
    """

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream())
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device | None) -> Clock:
    """The clock of a device; the host's without one."""
    return CudaClock() if device is not None and device.type == "cuda" else Clock()

"""CPU cores and memory of this machine, and clocks that time CPU and CUDA work."""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_a_rank(ranks: int) -> int:
    """Return the threads per rank: OMP_NUM_THREADS if set, else the cores divided by ``ranks``."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and len(wanted) < 5 and int(wanted):
        return int(wanted)
    return max(1, available_cores() // ranks)


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of a step, because page faults of new memory slow each step.

    Each process keeps up to 1 GiB of freed memory.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 1 << 28)
        set_option(_M_TRIM_THRESHOLD, 1 << 30)


class Clock:
    """Measures the time of CPU work with the wall clock."""

    def mark(self) -> Any:
        """Return the current time, as an argument of ``seconds``."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two results of ``mark``."""
        return float(end - start)


class CudaClock(Clock):
    """Measures the time of CUDA work with events.

    ``mark`` records an event on the default stream, where the training step runs.
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
    """Return a clock for work on a device: CUDA events for ``cuda``, else the wall clock."""
    return CudaClock() if device is not None and device.type == "cuda" else Clock()

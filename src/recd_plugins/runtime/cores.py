"""The cores of this machine."""

from __future__ import annotations

import os


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_a_rank(ranks: int) -> int:
    """OMP_NUM_THREADS, where it is set to a number; else this process's cores shared out."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and len(wanted) < 5 and int(wanted):
        return int(wanted)
    return max(1, available_cores() // ranks)

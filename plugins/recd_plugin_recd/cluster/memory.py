"""How much memory there is, and how a run divides it."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

from recd_plugin_recd.cluster.arena import SPARE
from recd_plugins.errors import DataError

_MB = 1 << 20
#: Bytes of a decoded batch: less costs calls, more costs page faults.
BATCH_BYTES = 16 * _MB
#: Most bytes of a range: the 32-bit offsets of strings and lists never overflow.
_MAX_RANGE = 1 << 30
#: What compiling takes, and what allocators keep of freed memory.
_SLACK = 200 * _MB
#: Of each column while rows are read: pages, as they are stored and decoded.
_COLUMN = 4 * _MB
#: Batches in memory while rows are dealt to ranges: read ahead, gathered, written.
_BATCHES = 8
#: Row groups in memory while one is made and written: gathered, waiting, encoded.
_GROUPS = 3
#: Of each row of a range that is sorted: session and time as numbers, their order, names.
_KEYS = 80
#: What allocators keep of the memory for reading when rows stay in memory and are written next.
_KEPT = 4 * BATCH_BYTES
_MAX_WORKERS = 8


@dataclass(frozen=True)
class Plan:
    """How ranges are made and written.

    Attributes:
        range_bytes: most bytes of a range, in memory.
        workers: ranges that are written at once.
        whole_bytes: a partition of so many bytes is sorted in memory, without spilling.
    """

    range_bytes: int
    workers: int
    whole_bytes: int


class Budget:
    """The memory of a run, and what the process took of it before the run started.

    Args:
        memory: bytes that the process may take.
        base: bytes that it took before.
        copied_share: share of a row's bytes in columns that are held twice while they are sorted.
    """

    def __init__(
        self,
        memory: int,
        base: int,
        row_group_rows: int,
        num_columns: int,
        copied_share: float,
    ) -> None:
        self._memory, self._base = memory, base
        self._row_group_rows, self._num_columns = row_group_rows, num_columns
        self._copied = SPARE + copied_share

    def plan(self, row_bytes: float) -> Plan:
        """Divide the memory between the parts of the work, for rows of this mean size.

        Raises:
            DataError: it is too little; the message says the minimum.
        """
        free = self._memory - self._base - _SLACK
        groups = int(_GROUPS * self._row_group_rows * row_bytes)
        factor = self._copied + _KEYS / max(1.0, row_bytes)
        smallest = int(max(self._row_group_rows * row_bytes, BATCH_BYTES) * factor)
        needed = max(smallest + groups, _BATCHES * BATCH_BYTES + self._num_columns * _COLUMN)
        if free < needed:
            minimum = -(-(self._memory - free + needed) // 1_000_000)
            raise DataError(
                f"--memory {self._memory / 1e6:.0f}MB is too small: {minimum}MB is the least for "
                f"row groups of {self._row_group_rows} rows of {row_bytes:,.0f} bytes; give more, "
                "or lower --row-group-rows"
            )
        workers = min(num_cores(), _MAX_WORKERS, free // (smallest + groups))
        range_bytes = int((free / workers - groups) / factor)
        range_bytes = min(range_bytes, _MAX_RANGE)
        return Plan(range_bytes, workers, max(0, workers * range_bytes - _KEPT))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident() -> int:
    """Bytes of this process that are in memory, Python and libraries included."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int:
    """The most that this process ever took, and those that it started and that run (Spark's)."""
    import psutil

    processes = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    try:
        return sum(map(_high_water, processes))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _high_water(process: int) -> int:
    """Unlike ru_maxrss it does not count the process that started this one."""
    with open(f"/proc/{process}/status", encoding="ascii") as lines:
        found = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(found.split()[1]) * 1024

"""How much memory there is, and how a run divides it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from recd_plugin_recd.cluster.arena import SPARE
from recd_plugins.api import DataError

_MB = 1 << 20
#: Bytes of a decoded batch: less costs calls, more costs page faults.
BATCH_BYTES = 16 * _MB
#: Most bytes of a range: the 32-bit offsets of strings and lists never overflow.
_MAX_RANGE = 1 << 30
#: What compiling takes, and what allocators keep of freed memory.
_SLACK = 200 * _MB
#: Python, Arrow and numba, of which 160 MB were measured; and what a plugin may import.
_LIBRARIES = 200_000_000
_TORCH = 200_000_000
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
#: The least memory is said in these steps: libraries take some MB more or less from run to run.
_LEAST_STEP = 10_000_000


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


@dataclass(frozen=True)
class RowSize:
    """How large rows are.

    Attributes:
        bytes: of a row in memory, in the mean.
        copied_share: share of them in columns that are held twice while they are sorted.
    """

    bytes: float
    copied_share: float


class Budget:
    """The memory of a run, which is that of all its partitions.

    What is freed when a partition is done stays with the process and is used again for the next.

    Args:
        memory: bytes that the process may take.
        base: bytes of it that Python and its libraries take.
    """

    def __init__(self, memory: int, base: int, row_group_rows: int, num_columns: int) -> None:
        self._memory, self._base, self._row_group_rows = memory, base, row_group_rows
        self._free = memory - base - _SLACK
        self._reading = _BATCHES * BATCH_BYTES + num_columns * _COLUMN

    def check(self, sizes: Sequence[RowSize]) -> None:
        """Refuse memory that is too little for partitions of such rows.

        Raises:
            DataError: the message says the least.
        """
        needed = max((self._needed(size, self._row_group_rows) for size in sizes), default=0)
        if self._free >= needed:
            return
        least = -(-(self._base + _SLACK + needed) // _LEAST_STEP) * _LEAST_STEP
        advice = "give more"
        if self._free >= max(self._needed(size, 1) for size in sizes):
            advice += ", or lower --row-group-rows"
        raise DataError(
            f"--memory {size_text(self._memory)} is too small: {size_text(least)} is the least for "
            f"rows of up to {max(size.bytes for size in sizes):,.0f} bytes in row groups of "
            f"{self._row_group_rows:,}; {advice}"
        )

    def plan(self, size: RowSize) -> Plan:
        """Divide the memory between the parts of the work.

        Rows that turn out larger than those that were checked get smaller ranges.

        Raises:
            DataError: they are so much larger that not even that helps.
        """
        groups = self._groups(size, self._row_group_rows)
        factor = _factor(size)
        if self._free < groups + BATCH_BYTES * factor:
            self.check([size])
        workers = min(
            num_cores(), _MAX_WORKERS, self._free // self._writing(size, self._row_group_rows)
        )
        workers = max(1, workers)
        range_bytes = min(int((self._free / workers - groups) / factor), _MAX_RANGE)
        return Plan(range_bytes, workers, max(0, workers * range_bytes - _KEPT))

    def _needed(self, size: RowSize, row_group_rows: int) -> int:
        return max(self._writing(size, row_group_rows), self._reading)

    def _writing(self, size: RowSize, row_group_rows: int) -> int:
        """What one worker takes that sorts ranges of a row group."""
        smallest = max(row_group_rows * size.bytes, BATCH_BYTES)
        return int(smallest * _factor(size)) + self._groups(size, row_group_rows)

    @staticmethod
    def _groups(size: RowSize, row_group_rows: int) -> int:
        return int(_GROUPS * row_group_rows * size.bytes)


def _factor(size: RowSize) -> float:
    """What is held of a range, over its bytes."""
    return SPARE + size.copied_share + _KEYS / max(1.0, size.bytes)


def size_text(num_bytes: int) -> str:
    """A size as --memory takes it."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes / 1e6:.0f}MB" if num_bytes >= 10**6 else f"{num_bytes}B"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def of_libraries(parquet: bool) -> int:
    """Bytes that Python and its libraries take in a process of its own before it reads rows.

    Not those of this process: what asks may be a notebook with gigabytes of other things.

    Args:
        parquet: Parquet files are read, else a dataset, whose plugin may bring torch.
    """
    return _LIBRARIES if parquet else _LIBRARIES + _TORCH


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

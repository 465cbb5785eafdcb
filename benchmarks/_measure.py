"""Figures with their spread, and helpers that measure them fairly."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.versions import fbgemm_has_cuda

#: ``tiny`` takes seconds and only shows that a benchmark runs.
Size = Literal["tiny", "small", "reference"]
Device = Literal["cpu", "cuda"]
T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of ``runs`` samples, and their extremes."""

    figure: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    runs: int
    min: float
    max: float
    paper: float | str | None = None
    goal: float | None = None


@dataclass(frozen=True)
class Detail:
    """A table besides the figures."""

    title: str
    headings: list[str]
    rows: list[list[str | float]]


@dataclass(frozen=True)
class Bars:
    """What ``--plot`` draws: one bar of each series at each label.

    Attributes:
        title: of the chart.
        unit: of the values, on the horizontal axis.
        labels: of the bars.
        series: values by name, one for each label.
        stacked: series follow one another in one bar.
    """

    title: str
    unit: str
    labels: list[str]
    series: dict[str, list[float]]
    stacked: bool = False


@dataclass(frozen=True)
class Findings:
    """The report of one benchmark."""

    workload: str
    figures: list[Figure]
    details: list[Detail] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Append another part's figures."""
        self.figures.extend(other.figures)
        self.details.extend(other.details)
        self.notes.extend(other.notes)
        self.bars.extend(other.bars)


def higher(figure: str, samples: Sequence[float] | float, unit: str = "ratio", **of: Any) -> Figure:
    """Return a figure of which higher values are better; ``of`` is ``paper`` and ``goal``."""
    return _figure(figure, samples, unit, "higher", **of)


def lower(figure: str, samples: Sequence[float] | float, unit: str = "ratio", **of: Any) -> Figure:
    """Return a figure of which lower values are better; ``of`` is ``paper`` and ``goal``."""
    return _figure(figure, samples, unit, "lower", **of)


def _figure(figure: str, samples: Any, unit: str, better: Any, **of: Any) -> Figure:
    values = [float(each) for each in (samples if isinstance(samples, Sequence) else [samples])]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{figure}: a sample of {values} is no finite number")
    median = statistics.median(values)
    return Figure(figure, median, unit, better, len(values), min(values), max(values), **of)


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Divide turn by turn."""
    return [one / other for one, other in zip(over, under, strict=True)]


def max_abs_diff(curves: Iterable[Sequence[float]]) -> float:
    """Return the largest difference of the losses of one step; NaN if any loss is."""
    every = torch.tensor(list(curves), dtype=torch.float64)
    return float((every.amax(0) - every.amin(0)).max())


def in_turn(
    first: Callable[[T], object],
    second: Callable[[T], object],
    inputs: Sequence[T],
    turns: int = 5,
) -> list[tuple[float, float]]:
    """Return processor times of two functions on each input, in turns after one that warms up."""
    times = []
    for turn in range(turns + 1):
        for item in inputs:
            pair = _processor_seconds(first, item), _processor_seconds(second, item)
            if turn:
                times.append(pair)
    return times


def _processor_seconds(function: Callable[[T], object], item: T) -> float:
    with one_thread():
        start = time.thread_time()
        function(item)
        return time.thread_time() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute in the calling thread, so that its processor time is all there is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> bool:
    """Have glibc serve large blocks from freed memory, which new pages would slow at random."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    )


def from_every_rank(value: T) -> list[T]:
    """Return the values of all ranks. A collective call."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def mean_over_ranks(losses: Sequence[torch.Tensor]) -> list[float]:
    """Return the mean of each loss over the ranks. A collective call."""
    stacked = torch.stack([loss.detach() for loss in losses]).double().cpu()
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


def check_device(device: Device) -> None:
    """Raise SetupError for ``cuda`` where torch or FBGEMM has none."""
    if device == "cuda" and not (torch.cuda.is_available() and fbgemm_has_cuda()):
        raise SetupError("--device cuda: torch finds no CUDA device, or FBGEMM is the CPU build")


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        **gpu,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchrec", "pyarrow", "numba")},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = next(line for line in lines if line.startswith("model name"))
            return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

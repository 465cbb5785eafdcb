"""Benchmark figures with their spread, and helpers for fair timing."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import torch
import torch.distributed as dist

from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.versions import fbgemm_has_cuda

#: ``tiny`` takes seconds and only shows that a benchmark runs.
Size = Literal["tiny", "small", "reference"]
Device = Literal["cpu", "cuda"]
T = TypeVar("T")
DEVICE = click.Option(["--device"], type=click.Choice(["cpu", "cuda"]), default="cpu")


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median, minimum and maximum of ``runs`` samples."""

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
    """A table that a report shows in addition to its figures."""

    title: str
    headings: list[str]
    rows: list[list[str | float]]


@dataclass(frozen=True)
class Findings:
    """Report of one benchmark."""

    workload: str
    figures: list[Figure]
    details: list[Detail] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Append the figures, tables and notes of another report."""
        self.figures.extend(other.figures)
        self.details.extend(other.details)
        self.notes.extend(other.notes)


def _figure(better: Any, figure: str, samples: Any, unit: str = "ratio", **of: Any) -> Figure:
    values = [float(each) for each in (samples if isinstance(samples, Sequence) else [samples])]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{figure}: a sample is not finite in {values}. Check the benchmark.")
    median = statistics.median(values)
    return Figure(figure, median, unit, better, len(values), min(values), max(values), **of)


#: Return a figure of which a higher or a lower value is better, from one sample or several.
#: Arguments: name, samples, unit, and optionally ``paper`` and ``goal``.
higher, lower = partial(_figure, "higher"), partial(_figure, "lower")


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Divide two sequences element by element."""
    return [one / other for one, other in zip(over, under, strict=True)]


def max_abs_diff(curves: Iterable[Sequence[float]]) -> float:
    """Return the largest difference between loss curves at any step, or NaN if a loss is NaN."""
    every = torch.tensor(list(curves), dtype=torch.float64)
    return float((every.amax(0) - every.amin(0)).max())


def in_turn(
    first: Callable[[T], object], second: Callable[[T], object], inputs: Sequence[T], turns: int = 5
) -> list[tuple[float, float]]:
    """Return the CPU seconds of two functions on each input, after one warm-up turn."""
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
    """Limit torch to one thread, so that the CPU time of this thread covers all work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def from_every_rank(value: T) -> list[T]:
    """Return the values of all ranks. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def check_device(device: Device) -> None:
    """Raise SetupError if the device is ``cuda`` but torch or FBGEMM has no CUDA support."""
    if device == "cuda" and not (torch.cuda.is_available() and fbgemm_has_cuda()):
        raise SetupError("--device cuda: torch or FBGEMM cannot use CUDA. Use --device cpu.")


def machine() -> dict[str, Any]:
    """Return the processor, GPU and package versions of this machine."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": named[1] if named else platform.machine(),
        "cores": os.cpu_count(),
        **gpu,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchrec", "pyarrow", "numba")},
    }

"""The form of a benchmark: figures with their spread, and helpers that measure them fairly.

A benchmark is a module that the hook ``register_benchmarks`` names, with ``SUMMARY``,
``workload(size)`` and ``run(size)``. Further parameters of both, by keyword, become options of
``recd bench``, of the types that ``run`` is annotated with; ``HELP`` says what they are. One
without a default has to be given, and a bool of True has ``--no-NAME``. With
``plot(result, folder)`` it draws what it found::

    from recd_plugins.testing.benchmark import Figure, Size, seconds

    SUMMARY = "a lookup of ours"
    HELP = {"rows": "Rows of the table."}

    def workload(size: Size, *, rows: int = 1000) -> str:
        return f"{rows} rows"

    def run(size: Size, *, rows: int = 1000) -> list[Figure]:
        times = [seconds(lambda: lookup(rows)) for _ in range(5)]
        return [Figure.of("lookup_seconds", times, unit="s", better="lower")]
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from recd_plugins.distributed.equal_gradients import all_gradients_sent
from recd_plugins.errors import PluginError, RecdError

__all__ = [
    "Benchmark",
    "Detail",
    "Figure",
    "Findings",
    "Size",
    "all_gradients_sent",
    "in_turn",
    "keep_freed_memory",
    "largest",
    "machine",
    "movielens",
    "one_thread",
    "processor_seconds",
    "report",
    "seconds",
]

#: ``tiny`` takes seconds and shows that every figure is measured; its figures mean nothing.
Size = Literal["tiny", "small", "reference"]
Input = TypeVar("Input")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of ``runs`` runs, and their extremes.

    Attributes:
        paper: what the paper reports for it, if it does.
        goal: what this project aims at, if it does.
    """

    figure: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    runs: int
    min: float
    max: float
    paper: float | str | None = None
    goal: float | None = None

    @classmethod
    def of(
        cls,
        figure: str,
        samples: Sequence[float],
        *,
        unit: str,
        better: Literal["higher", "lower"],
        paper: float | str | None = None,
        goal: float | None = None,
    ) -> Figure:
        """The median of ``samples``.

        Raises:
            ValueError: a sample is no finite number.
        """
        for sample in samples:
            if not math.isfinite(sample):
                raise ValueError(f"{figure}: a sample is {sample!r:.80}; expected finite numbers")
        return cls(
            figure,
            statistics.median(samples),
            unit,
            better,
            len(samples),
            min(samples),
            max(samples),
            paper,
            goal,
        )


@dataclass(frozen=True)
class Detail:
    """A table that stands besides the figures; cells are words or numbers."""

    title: str
    headings: list[str]
    rows: list[list[str | float]]


@dataclass(frozen=True)
class Findings:
    """Figures, and what explains them."""

    figures: list[Figure]
    details: list[Detail]
    notes: list[str]


class Benchmark(Protocol):
    """What a benchmark module has."""

    SUMMARY: str

    def workload(self, size: Size, **options: Any) -> str:
        """The input in words."""

    def run(self, size: Size, **options: Any) -> list[Figure] | Findings:
        """Measure."""


def largest(values: Iterable[float]) -> float:
    """The largest number; NaN is the largest of all, which ``max`` overlooks behind another."""
    return max(values, key=lambda value: (math.isnan(value), value))


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turn(
    first: Callable[[Input], object],
    second: Callable[[Input], object],
    inputs: Sequence[Input],
    turns: int = 5,
) -> list[tuple[float, float]]:
    """Processor times of two functions on each input, ``turns`` times, one right after the other.

    Processor time, so that other work on the machine does not count. One more turn warms up.
    """
    times = []
    for turn in range(turns + 1):
        for item in inputs:
            pair = processor_seconds(first, item), processor_seconds(second, item)
            if turn:
                times.append(pair)
    return times


def processor_seconds(function: Callable[[Input], object], item: Input) -> float:
    """Time of one call in this thread, without that of other work on the machine."""
    with one_thread():
        start = time.thread_time()
        function(item)
        return time.thread_time() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes in the thread that calls it, whose time is all then."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> bool:
    """Make glibc's allocator serve large blocks from memory that was freed, in this process."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    )


def movielens() -> Path | None:
    """MovieLens-100K where the environment says where it is.

    Raises:
        RecdError: it is not there.
    """
    given = os.environ.get("RECD_MOVIELENS")
    if given is None:
        return None
    path = Path(given)
    if not path.is_file():
        raise RecdError(f"RECD_MOVIELENS: {path} is no file; examples/movielens says how to get it")
    return path.resolve()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        **_gpu(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchrec", "pyarrow", "numba")},
    }


def report(name: str, benchmark: Benchmark, size: Size, **options: Any) -> dict[str, Any]:
    """Run a benchmark; the result in the form of ``recd bench --json``.

    Raises:
        PluginError: it returned something else than figures, or a number that is none.
    """
    workload: object = benchmark.workload(size, **options)
    if not isinstance(workload, str):
        raise PluginError(f"benchmark {name}: workload returned {workload!r:.200}; expected words")
    returned: Any = benchmark.run(size, **options)
    found = returned
    if isinstance(returned, Iterable) and (figures := list(returned)):
        found = Findings(figures, [], [])
    # Details of Findings may say it all.
    if not isinstance(found, Findings) or not _is_form(found):
        raise PluginError(
            f"benchmark {name}: run returned {returned!r:.200}; expected Figures, at least one, of "
            "which higher or lower values are better, or Findings"
        )
    for what, number in _numbers(found):
        # True is none, nor are a tensor and what NumPy has of its own.
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number):
            raise PluginError(
                f"benchmark {name}: run returned {what} as {number!r:.80}; expected a finite "
                "number, an int or a float (float() makes one of a tensor)"
            )
    return {"name": name, "machine": machine(), "workload": workload, **asdict(found)}


def _is_form(found: Findings) -> bool:
    """Whether lists are lists of what they should be, and words are words."""
    lists: tuple[object, ...] = found.figures, found.details, found.notes
    return (
        all(isinstance(each, list) for each in lists)
        and all(map(_is_figure, found.figures))
        and all(map(_is_detail, found.details))
        and all(isinstance(note, str) for note in found.notes)
    )


def _is_figure(value: object) -> bool:
    return (
        isinstance(value, Figure)
        and value.better in ("higher", "lower")
        and isinstance(value.figure, str)
        and isinstance(value.unit, str)
    )


def _is_detail(value: object) -> bool:
    return (
        isinstance(value, Detail)
        and isinstance(value.title, str)
        and isinstance(value.headings, Sequence)
        and all(isinstance(heading, str) for heading in value.headings)
        and isinstance(value.rows, Sequence)
        and all(isinstance(row, Sequence) for row in value.rows)
    )


def _numbers(found: Findings) -> Iterator[tuple[str, Any]]:
    """What has to be a number of each figure, with what it is in words."""
    for figure in found.figures:
        for part in ("value", "min", "max", "runs"):
            words = figure.figure if part == "value" else f"{part} of {figure.figure}"
            yield words, getattr(figure, part)
        if figure.goal is not None:
            yield f"goal of {figure.figure}", figure.goal
        if figure.paper is not None and not isinstance(figure.paper, str):
            yield f"paper of {figure.figure}", figure.paper


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, str]:
    """Its name, where torch finds one."""
    import torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

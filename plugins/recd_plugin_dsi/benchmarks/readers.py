"""Readers that keep a trainer busy: how many, how their number is found, and what deaths cost.

A step of preprocessing takes 3.5 times as long as training on its batch. One that waits, as for a
feature store, is answered with more readers, whatever the cores; one that computes needs cores. The
trainer has one thread. Its speed on batches that lie ready is measured in the same process, before
there are readers and after them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from recd_plugins.testing.benchmark import Detail, Figure, Findings, Size

SUMMARY = "stalls with autoscaled readers, and rows of readers that are killed"

_SLOWNESS = 3.5
_TARGET = 0.05
_STEPS: dict[Size, int] = {"tiny": 12, "small": 320, "reference": 1200}
_RUNS: dict[Size, int] = {"tiny": 1, "small": 1, "reference": 3}
_WORKER_STEPS: dict[Size, int] = {"tiny": 4, "small": 24, "reference": 200}
# Of a run, the last steps that count: those after it found its number of readers.
_LAST: dict[Size, int] = {"tiny": 4, "small": 96, "reference": 256}
_EPOCH_SECONDS: dict[Size, float] = {"tiny": 2.0, "small": 24.0, "reference": 60.0}
_KILL_WAIT = 0.15
_WAITING = "max_readers: 8, cpus_per_reader: 0.2, stall_window: 12"
_COMPUTING = "max_readers: 8, stall_window: 12"


def workload(size: Size) -> str:
    """The input in words."""
    from recd_plugin_dsi.benchmarks.setup import BATCH

    return (
        f"preprocessing of {_SLOWNESS} steps a batch of {BATCH} rows, {_STEPS[size]} steps; an "
        "epoch of two ranks and four readers, one killed every 10 s"
    )


def run(size: Size) -> Findings:
    """Measure."""
    found = Findings([], [], [])
    with tempfile.TemporaryDirectory() as folder:
        _autoscaling(found, Path(folder), size)
        _kills(found, Path(folder), size)
    return found


def _autoscaling(found: Findings, folder: Path, size: Size) -> None:
    from recd_plugin_dsi.benchmarks.feeding import Fed, alone, feed
    from recd_plugin_dsi.benchmarks.setup import BLOCK, write_registry, write_table
    from recd_plugins.api.ingestion import Pace

    steps, last = _STEPS[size], _LAST[size]
    batches = steps + 24
    write_table(folder / "table.parquet", batches)
    step = alone(write_registry(folder, "alone", batches))
    slow = _SLOWNESS * step
    pace = Pace(slow, step, block=BLOCK)
    needed = pace.readers_for(_TARGET) or 0
    waiting = [
        feed(write_registry(folder, "waiting", batches, seconds=slow, ray=_WAITING), steps)
        for _ in range(_RUNS[size])
    ]
    found.figures.extend(_fed("autoscaled", waiting, last, goal=True))
    found.figures.append(
        Figure.of(
            "autoscaled_readers",
            [each.readers[-1] for each in waiting],
            unit="readers",
            better="lower",
        )
    )
    rows: list[list[str | float]] = []
    for workers in (0, 1, needed):
        path = write_registry(folder, f"{workers}", batches, seconds=slow, workers=workers)
        runs = [feed(path, _WORKER_STEPS[size]) for _ in range(_RUNS[size])]
        counted = _WORKER_STEPS[size] // 2
        found.figures.extend(_fed(f"workers_{workers}", runs, counted))
        share = median(each.stall_share(counted) for each in runs)
        rows.append([f"{workers}", pace.stall_share(workers), share])
    found.details.append(
        Detail(
            "Waiting load, training.workers: share of a step that the trainer waits",
            ["workers", "by the rule", "measured"],
            rows,
        )
    )
    busy: Fed = feed(
        write_registry(folder, "busy", batches, seconds=slow, by="computing", ray=_COMPUTING),
        steps // 2,
    )
    found.figures.extend(_fed("computing", [busy], last // 2))
    full = [line for line in busy.said.splitlines() if "no more cores" in line]
    found.figures.append(
        Figure.of("computing_says_no_more_cores", [float(bool(full))], unit="", better="higher")
    )
    found.notes.extend(f"computing: {line}" for line in full)
    found.details.append(_over_time(waiting[0]))


def _fed(name: str, runs: Sequence[Any], last: int, goal: bool = False) -> list[Figure]:
    return [
        Figure.of(
            f"{name}_stall_share",
            [each.stall_share(last) for each in runs],
            unit="ratio",
            better="lower",
            goal=_TARGET if goal else None,
        ),
        Figure.of(
            f"{name}_throughput_of_trainer",
            [each.throughput_of_trainer(last) for each in runs],
            unit="ratio",
            better="higher",
            goal=0.9 if goal else None,
        ),
    ]


def _over_time(fed: Any) -> Detail:
    """Readers and waiting, in stretches of the run."""
    stretch = max(1, len(fed.seconds) // 20)
    rows: list[list[str | float]] = []
    seconds = 0.0
    for first in range(0, len(fed.seconds) - stretch + 1, stretch):
        part = slice(first, first + stretch)
        seconds += sum(fed.seconds[part])
        share = sum(fed.waited[part]) / sum(fed.seconds[part])
        rows.append([f"{first + stretch}", seconds, float(fed.readers[part][-1]), share])
    return Detail(_OVER_TIME, ["step", "seconds", "readers", "waiting"], rows)


_OVER_TIME = "Autoscaling against a waiting load"


def _kills(found: Findings, folder: Path, size: Size) -> None:
    from recd_plugin_dsi.benchmarks.killing import epoch_with_kills
    from recd_plugin_dsi.benchmarks.setup import BLOCK, write_table

    # Four readers; whole row groups for both ranks.
    batches = int(_EPOCH_SECONDS[size] * 4 / _KILL_WAIT) // (2 * BLOCK) * 2 * BLOCK
    write_table(folder / "table.parquet", batches)
    killed = epoch_with_kills(folder, batches, _KILL_WAIT)
    for name in ("lost", "repeated"):
        figure = f"rows_{name}_of_killed_readers"
        value = float(getattr(killed, name))
        found.figures.append(Figure.of(figure, [value], unit="rows", better="lower", goal=0.0))
    found.figures.append(
        Figure.of("readers_killed", [float(killed.kills)], unit="readers", better="higher")
    )


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Readers and waiting over time."""
    from matplotlib.figure import Figure as Picture

    from recd_plugins.testing.svg import COLORS, write_svg

    detail = next(each for each in result["details"] if each["title"] == _OVER_TIME)
    _, seconds, readers, waiting = zip(*detail["rows"], strict=True)

    def draw(picture: Picture) -> None:
        above, below = picture.subplots(2, 1, sharex=True)
        above.step(seconds, readers, where="pre", color=COLORS[0])
        above.set(ylabel="readers", ylim=(0, None))
        below.plot(seconds, waiting, color=COLORS[1])
        below.axhline(_TARGET, color=COLORS[-1], linestyle="--")
        below.set(xlabel="seconds", ylabel="trainer waits, of a step", ylim=(0, 1))

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "readers.svg"
    write_svg(path, 4, draw)
    return [path]

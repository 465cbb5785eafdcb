"""What three lines give trainers that exist, and what ``dedup(loader)`` costs.

Each trainer is trained as it is and with its three lines, in turns, in the same ranks and from the
same weights. Loaders are read in turns, too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from recd_plugin_recd.benchmarks.drop_in_parts.loaders import read_turns
from recd_plugin_recd.benchmarks.drop_in_parts.ranks import (
    Job,
    Measured,
    losses_one_rounding_off,
    measure,
)
from recd_plugin_recd.benchmarks.drop_in_parts.three_lines import Side
from recd_plugin_recd.benchmarks.drop_in_parts.trainers.session_data import Size as TrainerSize
from recd_plugins.api.distributed import Ranks
from recd_plugins.testing.benchmark import (
    Detail,
    Figure,
    Findings,
    Size,
    keep_freed_memory,
    largest,
)

SUMMARY = "stock trainers with three lines changed against what they were, and dedup(loader)"
HELP = {"only": "One part of it."}

Part = Literal["golden", "dlrm_main", "hstu", "nothing_to_dedup", "loaders"]
PARTS: tuple[Part, ...] = ("golden", "dlrm_main", "hstu", "nothing_to_dedup", "loaders")
#: Trainers of a part, by the name of their figures: source and diff, and options of its ``build``.
_TRAINERS: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "golden": {"golden": ("golden", {})},
    "dlrm_main": {
        "dlrm_main": ("dlrm_main", {}),
        "dlrm_main_qcomms": ("dlrm_main", {"qcomms": True}),
    },
    "hstu": {"hstu": ("hstu", {}), "hstu_pooled": ("hstu_pooled", {})},
}
_SIZES: dict[Size, TrainerSize] = {
    "tiny": TrainerSize(16, 4, 100, 8, 8),
    "small": TrainerSize(256, 60, 10_000, 32, 32),
    "reference": TrainerSize(1024, 60, 20_000, 64, 64),
}
_TURNS: dict[Size, int] = {"tiny": 1, "small": 10, "reference": 10}
_STEPS: dict[Size, int] = {"tiny": 2, "small": 5, "reference": 5}
_ROWS_PER_SESSION = 12
_RANKS = 2
_TABLE_ROWS: dict[Size, int] = {"tiny": 512, "small": 8192, "reference": 32_768}
_READ_BATCHES: dict[Size, dict[str, int]] = {
    "tiny": {"small_batches": 64, "large_batches": 256},
    "small": {"small_batches": 512, "large_batches": 4096},
    "reference": {"small_batches": 512, "large_batches": 4096},
}


def workload(size: Size, *, only: Part | None = None) -> str:  # noqa: ARG001
    """The input in words."""
    each = _SIZES[size]
    return (
        f"{_RANKS} ranks x batch {each.batch_size}, embedding_dim {each.embedding_dim}, sessions "
        f"of {_ROWS_PER_SESSION} rows, {_TURNS[size]} turns of {_STEPS[size]} steps; PAPERCAL, "
        f"{_TABLE_ROWS[size]} rows clustered by session"
    )


def run(size: Size, *, only: Part | None = None) -> Findings:
    """Measure."""
    found = Findings([], [], [])
    parts = PARTS if only is None else (only,)
    if "loaders" in parts:
        _read(size, found)
    with Ranks(_RANKS) as ranks:
        for part, trainers in _TRAINERS.items():
            for name, (trainer, options) in trainers.items() if part in parts else ():
                job = Job(
                    trainer, _SIZES[size], _ROWS_PER_SESSION, _TURNS[size], _STEPS[size], options
                )
                rounding = ranks.run(losses_one_rounding_off, job)[0]
                _trained(name, job, ranks.run(measure, job)[0], rounding, found)
        if "nothing_to_dedup" in parts:
            job = Job("golden", _SIZES[size], 1, _TURNS[size], _STEPS[size])
            _nothing_to_dedup(ranks.run(measure, job)[0], found)
    return found


def _trained(
    name: str, job: Job, sides: Mapping[Side, Measured], rounding: list[float], found: Findings
) -> None:
    stock, ours = sides["stock"], sides["ours"]
    found.figures.extend(
        [
            Figure.of(
                f"{name}_samples_per_second_over_stock",
                [a / b for a, b in zip(stock.seconds, ours.seconds, strict=True)],
                unit="ratio",
                better="higher",
            ),
            Figure.of(
                f"{name}_processor_time_over_stock",
                _ratios(ours.processor_seconds, stock.processor_seconds),
                unit="ratio",
                better="lower",
            ),
            _loss_figure(name, stock, ours),
            Figure.of(
                f"{name}_loss_max_abs_diff_of_one_rounding",
                [_apart(stock.losses, rounding)],
                unit="loss",
                better="lower",
            ),
        ]
    )
    rows = job.size.batch_size * _RANKS
    found.details.append(
        Detail(
            name,
            ["side", "samples a second", "step, ms", "processor, ms", "first loss", "last loss"],
            [
                [
                    side,
                    rows / _median(each.seconds),
                    _median(each.seconds) * 1e3,
                    _median(each.processor_seconds) * 1e3,
                    each.losses[0],
                    each.losses[-1],
                ]
                for side, each in sides.items()
            ],
        )
    )
    found.notes.extend(f"{name}: {said}" for said in ours.said)


def _nothing_to_dedup(sides: Mapping[Side, Measured], found: Findings) -> None:
    """A step of the trainer whose steps are shortest, on rows of which none repeats another."""
    stock, ours = sides["stock"], sides["ours"]
    found.figures.append(
        Figure.of(
            "nothing_to_dedup_processor_time_over_stock",
            _ratios(ours.processor_seconds, stock.processor_seconds),
            unit="ratio",
            better="lower",
            goal=1.03,
        )
    )
    found.figures.append(
        Figure.of(
            "nothing_to_dedup_step_time_over_stock",
            _ratios(ours.seconds, stock.seconds),
            unit="ratio",
            better="lower",
        )
    )
    found.figures.append(_loss_figure("nothing_to_dedup", stock, ours))
    found.notes.extend(f"nothing_to_dedup: {said}" for said in ours.said)


def _read(size: Size, found: Findings) -> None:
    keep_freed_memory()
    for batches, batch_size in _READ_BATCHES[size].items():
        with tempfile.TemporaryDirectory() as folder:
            turns = read_turns(Path(folder), _TABLE_ROWS[size], batch_size, _TURNS[size])
        for other in ("conversion", "ikjt"):
            found.figures.append(
                Figure.of(
                    f"dedup_loader_over_{other}_{batches}",
                    [
                        (turn["read"] + turn[other]) / (turn["read"] + turn["dedup"])
                        for turn in turns
                    ],
                    unit="ratio",
                    better="higher",
                    goal=0.9,
                )
            )
        found.details.append(
            Detail(
                f"loaders, batches of {batch_size}",
                ["part", "us a row"],
                [
                    [name, _median([turn[name] for turn in turns]) / _TABLE_ROWS[size] * 1e6]
                    for name in turns[0]
                ],
            )
        )


def _loss_figure(name: str, stock: Measured, ours: Measured) -> Figure:
    return Figure.of(
        f"{name}_loss_max_abs_diff",
        [_apart(stock.losses, ours.losses)],
        unit="loss",
        better="lower",
        goal=1e-6,
    )


def _apart(one: list[float], other: list[float]) -> float:
    return largest(abs(a - b) for a, b in zip(one, other, strict=True))


def _ratios(ours: list[float], stock: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, stock, strict=True)]


def _median(values: list[float]) -> float:
    return statistics.median(values)

"""Figures of a registry's training over those of stock TorchRec, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recd_plugins.testing.benchmark import Figure
from recd_plugins.training.assembly import Side
from recd_plugins.training.compare import Sides, in_rounds
from recd_plugins.training.session import session

__all__ = ["figures_over_stock"]

_SIDES: tuple[Side, ...] = ("baseline", "plugins")


def figures_over_stock(
    registry: Path,
    rounds: int,
    *,
    settings: Sequence[str] = (),
    paper: float | str | None = None,
    goal: float | None = None,
) -> list[Figure]:
    """Speed, bytes, ids and memory as ratios, and how far losses are apart.

    Each run has processes of its own; the sides take turns at being first.

    Args:
        registry: its file.
        rounds: runs of each side.
        settings: values of the file to change, ``KEY=VALUE``.
        paper: speed that a paper reports.
        goal: speed that is aimed at.

    Raises:
        RecdError: the registry, the data or the machine does not allow it.
    """
    overrides: dict[str, Any] = {
        "checkpoint": {},
        "validation": None,
    }  # neither is what it measures
    with session(registry, overrides=overrides, settings=settings, lasting=False) as trainer:
        found = in_rounds(_SIDES, rounds, trainer.train)
    pairs = [Sides(each) for each in found]
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        for name, over in pair.ratios("plugins").items():
            if over is not None:
                ratios.setdefault(name, []).append(over.median)
    return [
        Figure.of(
            "samples_per_second_over_stock",
            ratios["samples_per_second"],
            unit="ratio",
            better="higher",
            paper=paper,
            goal=goal,
        ),
        *(
            Figure.of(f"{name}_over_stock", ratios[name], unit="ratio", better="lower")
            for name in ("collective_bytes", "ids_looked_up", "peak_memory_bytes")
        ),
        Figure.of(
            "loss_max_abs_diff",
            [pair.loss_max_abs_diff("plugins") for pair in pairs],
            unit="loss",
            better="lower",
            goal=1e-5,
        ),
    ]

"""Compares training with a registry file to stock TorchRec on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import Figure, Size, higher, lower
from recd_plugins.training.result import Comparison, in_rounds
from recd_plugins.training.session import session
from recd_plugins.training.sharded_model import Variant
from recd_plugins.training.trainer import Job

RANKS = 2
#: Steps, pairs of runs, batch size per rank.
SIZES: dict[Size, tuple[int, int, int]] = {
    "tiny": (6, 1, 64),
    "small": (12, 1, 512),
    "reference": (30, 5, 512),
}


def figures_over_stock(
    registry: Path, rounds: int, settings: Sequence[str] = (), **of_speed: Any
) -> list[Figure]:
    """Return speed, bytes, ids and memory relative to stock TorchRec, and the loss difference.

    Every run starts new processes. ``rounds`` runs of each variant alternate in order. ``settings``
    override the registry file, and ``of_speed`` are ``paper`` and ``goal`` of the speed figure.
    """
    overrides: dict[str, Any] = {"checkpoint": {}, "validation": None}
    sides: tuple[Variant, ...] = ("baseline", "plugins")
    with session(Job(registry, overrides=overrides, settings=tuple(settings))) as trainer:
        pairs = [Comparison([each]) for each in in_rounds(sides, rounds, trainer.train)]
    found: dict[str, list[float]] = {}
    for pair in pairs:
        for name, over in pair.ratios("plugins").items():
            if over is not None:
                found.setdefault(name, []).append(over.median)
    losses = [pair.loss_max_abs_diff("plugins") for pair in pairs]
    return [
        higher("samples_per_second_over_stock", found["samples_per_second"], **of_speed),
        *(
            lower(f"{name}_over_stock", found[name])
            for name in ("collective_bytes", "ids_looked_up", "peak_memory_bytes")
        ),
        lower("loss_max_abs_diff", losses, "loss", goal=1e-5),
    ]

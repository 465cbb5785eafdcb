"""Training on requests, each with candidates, a history and one user; by recd_plugin_tables."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._measure import Findings, Size
from benchmarks._request_table import CANDIDATES, HISTORY, write_requests
from benchmarks._stock import figures_over_stock

_RANKS = 2
# Steps, pairs of runs, batch size of a rank.
_SIZES: dict[Size, tuple[int, int, int]] = {
    "tiny": (6, 1, 64),
    "small": (12, 1, 512),
    "reference": (30, 5, 512),
}


def run(size: Size) -> Findings:
    """Train pairs of runs, baseline and plugins, by the registry that ``recd init`` writes."""
    steps, pairs, batch_size = _SIZES[size]
    with tempfile.TemporaryDirectory() as name:
        registry = write_requests(Path(name), (steps + 2) * batch_size * _RANKS)
        settings = [
            # Only deduplication is compared, not other choices of auto.
            "sharding[0].use=torchrec.planner",
            f"dataset.options.cache={name}",
            f"training.batch_size={batch_size}",
            f"training.ranks={_RANKS}",
            f"training.steps={steps}",
            "training.checkpoint.path=null",
            # A smaller one amplifies rounding.
            "training.eps=1.0e-3",
        ]
        figures = figures_over_stock(registry, pairs, settings)
    return Findings(
        f"requests of {CANDIDATES} candidates, histories of {HISTORY}, the registry as recd init "
        f"writes it, {_RANKS} ranks x batch {batch_size}, {steps} steps, {pairs} pair(s) of runs",
        figures,
    )

"""Training on ranking requests with candidates and histories, compared to stock TorchRec."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._measure import Findings, Size
from benchmarks._request_table import CANDIDATES, HISTORY, write_requests
from benchmarks._stock import RANKS, SIZES, figures_over_stock


def run(size: Size) -> Findings:
    """Train pairs of runs, stock and with plugins, with the registry that ``recd init`` writes."""
    steps, pairs, batch_size = SIZES[size]
    with tempfile.TemporaryDirectory() as name:
        registry = write_requests(Path(name), (steps + 2) * batch_size * RANKS)
        settings = [
            # Use a fixed sharding, so that only deduplication differs.
            "sharding[0].use=torchrec.planner",
            f"dataset.options.cache={name}",
            f"training.batch_size={batch_size}",
            f"training.ranks={RANKS}",
            f"training.steps={steps}",
            "training.checkpoint.path=null",
            # A smaller eps amplifies rounding errors.
            "training.eps=1.0e-3",
        ]
        figures = figures_over_stock(registry, pairs, settings)
    return Findings(
        f"requests of {CANDIDATES} candidates, histories of {HISTORY} items, a registry written by "
        f"recd init, {RANKS} ranks x batch {batch_size}, {steps} steps, {pairs} pair(s) of runs",
        figures,
    )

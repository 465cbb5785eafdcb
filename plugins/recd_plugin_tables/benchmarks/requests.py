"""Training on a table of requests, each with candidates, a history and one user."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from recd_plugin_tables.sources import open_source
from recd_plugin_tables.start.guess import Wanted, guess
from recd_plugin_tables.start.registry_text import registry_text
from recd_plugin_tables.start.survey import survey
from recd_plugins.testing.against_stock import figures_over_stock
from recd_plugins.testing.benchmark import Figure, Size
from recd_plugins.testing.request_table import CANDIDATES, HISTORY, request_table

SUMMARY = "training on requests of 38 candidates from recd init, stock TorchRec against ours"

_RANKS, _BATCH_SIZE = 2, 512
_STEPS: dict[Size, int] = {"tiny": 6, "small": 12, "reference": 30}
_PAIRS: dict[Size, int] = {"tiny": 1, "small": 1, "reference": 5}


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"requests of {CANDIDATES} candidates, histories of {HISTORY}, the registry as recd init "
        f"writes it, {_RANKS} ranks x batch {_batch_size(size)}, {_STEPS[size]} steps, "
        f"{_PAIRS[size]} pair(s) of runs"
    )


def run(size: Size) -> list[Figure]:
    """Pairs of runs, baseline and plugins, each in processes of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table, registry = folder / "requests.parquet", folder / "requests.yaml"
        rows = (_STEPS[size] + 2) * _batch_size(size) * _RANKS
        pq.write_table(request_table(-(-rows // CANDIDATES)), table)
        guesses = guess(survey(open_source(table)), Wanted(session="user", request="request"))
        text = registry_text(guesses, location=str(table), file=registry, source={}, test=0)
        registry.write_text(text, encoding="utf-8")
        settings = [
            # What deduplication saves is compared, and nothing of what else auto may choose.
            "sharding[0].use=torchrec.planner",
            f"dataset.options.cache={folder}",
            f"training.batch_size={_batch_size(size)}",
            f"training.ranks={_RANKS}",
            f"training.steps={_STEPS[size]}",
            "training.checkpoint.path=null",
            # A smaller one amplifies rounding.
            "training.eps=1.0e-3",
        ]
        return figures_over_stock(registry, _PAIRS[size], settings=settings)


def _batch_size(size: Size) -> int:
    return 64 if size == "tiny" else _BATCH_SIZE

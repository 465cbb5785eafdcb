"""Training on ranking requests with candidates and histories, compared to stock TorchRec.

Trains the built-in DLRM with mean pooling, and with two layers of target attention over histories
of 200 items.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import torch

from benchmarks._measure import Figure, Findings, Size, from_every_rank, higher, lower
from benchmarks._ranks import RankTrainer, first_batches, start_rank
from benchmarks._request_table import CANDIDATES, HISTORY, write_requests
from benchmarks._stock import RANKS, SIZES, figures_over_stock
from recd_plugins.config import ModelSpec
from recd_plugins.config.from_file import load_registry
from recd_plugins.runtime.launch import launch
from recd_plugins.training.sharded_model import Variant, build_sharded_model
from recd_plugins.training.step_profile import StepProfile

_LONG_HISTORY, _LAYERS = 200, 2
_TARGET_ATTENTION = (
    "pooling=[{use: recd.target_attention, features: [history], "
    f"options: {{target: shown_item_id, layers: {_LAYERS}}}}}]"
)
OPTIONS = [
    click.Option(
        ["--batch-size"],
        type=click.IntRange(min=1),
        help="Rows per batch and rank in all runs. Default: 64 with --size tiny, otherwise 2048.",
    )
]
# User features besides the history: user, country and hour of the day.
_USER_IDS = 3


def run(size: Size, batch_size: int | None = None) -> Findings:
    """Train pairs of runs, stock and with plugins, with registries that ``recd init`` writes."""
    steps, pairs, _ = SIZES[size]
    batch_size = batch_size or (64 if size == "tiny" else 2048)
    rows = (steps + 2) * batch_size * RANKS
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name, "mean"), Path(name, "attention")
        for folder in folders:
            folder.mkdir()
        plain = write_requests(folders[0], rows)
        attention = write_requests(folders[1], rows, _LONG_HISTORY)
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
        of_dlrm = figures_over_stock(plain, pairs, settings)
        settings.append(_TARGET_ATTENTION)
        of_attention = figures_over_stock(attention, pairs, settings)
        per_row = figures_over_stock(attention, pairs, [*settings, "model.pool_rows=all"])
        model = load_registry(plain).model
        assert model is not None
        peaks = launch(_step_peaks, RANKS, attention, settings)[0]
    speed, *others = of_dlrm
    losses = of_dlrm[-1], of_attention[-1], per_row[-1]
    figures: list[Figure] = [
        replace(speed, figure="dlrm_over_stock", goal=4),
        *others[:-1],
        replace(of_attention[0], figure="target_attention_over_stock", goal=8),
        higher(
            "target_attention_over_attention_per_row",
            of_attention[0].value / per_row[0].value,
            goal=3,
        ),
        lower(
            "target_attention_step_memory_over_stock",
            peaks["plugins"] / peaks["baseline"],
            goal=0.35,
        ),
        max(losses, key=lambda each: each.value),
    ]
    return Findings(
        f"requests of {CANDIDATES} candidates, histories of {HISTORY} items (target attention: "
        f"{_LONG_HISTORY}), registries written by recd init, {RANKS} ranks x batch {batch_size}, "
        f"{steps} steps, {pairs} pair(s) of runs",
        figures,
        notes=[_dlrm_bound(model), _bound()],
    )


def _step_peaks(
    _rank: int, _world_size: int, registry: Path, settings: list[str]
) -> dict[Variant, float]:
    """Return the bytes that a training step allocates at its peak, on the rank with the most."""
    start_rank()
    device, found = torch.device("cpu"), {}
    variants: tuple[Variant, ...] = ("baseline", "plugins")
    for variant in variants:
        parts = build_sharded_model(load_registry(registry, settings=settings), variant, device)
        pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
        trainer = RankTrainer(pipeline, first_batches(parts, device, 2), device)
        parts.dmp.train()
        trainer.steps(2)
        profiled = StepProfile(device, warmup=0)
        for _ in range(2):
            with profiled.step():
                trainer.steps(1)
        found[variant] = max(from_every_rank(profiled.memory().peak))
    return found


def _bound(dim: int = 16) -> str:
    """Return the multiply-adds of target attention per row, and the share that must run per row."""
    attended = _LAYERS * _LONG_HISTORY * 2 * dim
    stock, once = attended * (1 + dim), attended * (1 + dim / CANDIDATES)
    return (
        f"Bound: target attention needs {stock / 1e3:.0f}k multiply-adds per row in stock "
        f"TorchRec, and {once / 1e3:.0f}k with keys and values once per request, "
        f"{stock / once:.0f} times fewer. Ids and vectors of a history shrink {CANDIDATES} times."
    )


def _dlrm_bound(spec: ModelSpec) -> str:
    """Return the multiply-adds of the DLRM per row, its bytes, and what a candidate needs alone."""
    dim, of_user = spec.embedding_dim, _USER_IDS + 1
    pairs, user_pairs = (n * (n - 1) // 2 for n in (of_user + 2, of_user))
    layers = [2, *spec.bottom_mlp, dim], [dim + pairs, *spec.top_mlp, 1]
    stock = pairs * dim + sum(a * b for sizes in layers for a, b in pairwise(sizes))
    alone = stock - user_pairs * (dim + spec.top_mlp[0])
    sent = 8 * dim  # a float32 embedding and its gradient
    return (
        f"Bound of the DLRM, per row: stock needs {stock / 1e3:.1f}k multiply-adds and "
        f"{sent * (1 + _USER_IDS + HISTORY):,} bytes of embeddings and gradients. A candidate "
        f"alone needs {alone / 1e3:.1f}k and {sent}."
    )

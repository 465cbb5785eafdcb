"""How good a model is on the test split."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins import activity
from recd_plugins.interfaces import Split, TrainPipeline
from recd_plugins.interfaces.callback import Quality
from recd_plugins.planning.prepared import Prepared, Registry
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.metrics import Metrics
from recd_plugins.training.progress_bar import progress_bar
from recd_plugins.training.quality import Predictions
from recd_plugins.training.steps import steps


def splits_of(registry: Registry) -> tuple[Split, ...]:
    """The splits that a run reads."""
    splits = registry.dataset.splits()
    return splits if registry.training.evaluate else ("train",)


def evaluate(
    prepared: Prepared,
    dmp: DistributedModelParallel,
    pipeline: TrainPipeline,
    rank: int,
    world_size: int,
    device: torch.device,
    finite: FiniteRun,
) -> tuple[Quality | None, Mapping[str, float]]:
    """Quality and metrics on the test split, where there is one and the registry wants it."""
    split: Split = "test"
    registry = prepared.registry
    if split not in splits_of(registry):
        return None, {}
    loader = prepared.dataloader(rank=rank, world_size=world_size, split=split, device=device)
    predictions, metrics = Predictions(), Metrics(registry.path, registry.entries("metric"))
    losses: list[Tensor] = []
    dmp.eval()
    with (
        loader,
        torch.no_grad(),
        activity.doing("evaluating"),
        progress_bar(rank, split, 0, len(loader)) as advance,
    ):
        for loss, logits, labels in steps(pipeline, iter(loader), prepared.registry, dmp.module):
            predictions.update(logits, labels)
            metrics.update(logits, labels)
            losses.append(loss)
            advance(loss)
    finite.losses(losses, of=f" of the {split} split")
    return predictions.summarize(), metrics.results()

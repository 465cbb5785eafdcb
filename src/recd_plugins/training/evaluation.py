"""How good a model is on the test split."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins import activity
from recd_plugins.data.loader import EveryRow
from recd_plugins.distributed.step_counts import steps_kept
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Split, TrainPipeline
from recd_plugins.interfaces.callback import Quality
from recd_plugins.planning.prepared import Prepared
from recd_plugins.registry import RunConfig
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.metrics import Metrics
from recd_plugins.training.progress_bar import progress_bar
from recd_plugins.training.quality import Predictions
from recd_plugins.training.steps import steps
from recd_plugins.values.batch import ModelInput


def splits_of(registry: RunConfig) -> tuple[Split, ...]:
    """The splits that a run reads.

    Raises:
        PluginError: the dataset has none to train on, or others than there are.
    """
    splits = registry.dataset.splits()
    if not isinstance(splits, (tuple, list)) or not {"train"} <= {*splits} <= {*get_args(Split)}:
        raise PluginError(
            f"{registry.dataset.title}: splits returned {splits!r:.200}; return "
            "('train',) or ('train', 'test')"
        )
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
    """Quality and metrics on the test split, where there is one and the registry wants it.

    Of every row; a row that fills up a batch is scored and not counted.
    """
    split: Split = "test"
    registry = prepared.registry
    if split not in splits_of(registry):
        return None, {}
    entries = registry.entries("metric")
    predictions, metrics = Predictions(), Metrics(registry.path, entries)
    losses: list[Tensor] = []
    dmp.eval()
    with (
        EveryRow(prepared, rank, world_size, split, device, sessions=bool(entries)) as batches,
        steps_kept(dmp.module),
        torch.no_grad(),
        activity.doing("evaluating"),
        progress_bar(rank, split, 0, len(batches)) as advance,
    ):
        waiting: deque[tuple[int, Tensor | None]] = deque()
        outputs = steps(pipeline, _noted(batches, waiting), registry, dmp.module)
        for loss, logits, labels in outputs:
            count, sessions = waiting.popleft()
            counted = None if sessions is None else sessions[:count]
            predictions.update(logits[:count], labels[:count])
            if count:
                metrics.update(logits[:count], labels[:count], counted)
            losses.append(loss)
            advance(loss)
    finite.losses(losses, of=f" of the {split} split")
    with activity.doing("measuring quality", long=True):  # rank 0 has the rows of all
        return predictions.summarize(), metrics.results()


def _noted(
    batches: Iterable[tuple[ModelInput, int]], waiting: deque[tuple[int, Tensor | None]]
) -> Iterator[ModelInput]:
    """The batches, taken ahead by a pipeline; how many rows count, and their sessions, wait."""
    for batch, count in batches:
        waiting.append((count, batch.sessions))
        yield batch

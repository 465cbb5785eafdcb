"""How good the predictions are: loss, normalized entropy and AUC over all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecComputeMode

from recd_plugins.errors import RecdError
from recd_plugins.interfaces.callback import Quality
from recd_plugins.training.agreement import together
from recd_plugins.training.ties import tie_groups

_TASK = RecTaskInfo(name="label", label_name="label", prediction_name="prediction")


class Predictions:
    """Samples of this rank, 8 bytes each: all, or the last ones.

    Args:
        window: how many of the last, and the rest of their batch; None for all.

    Attributes:
        num_samples: how many there are now.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._kept: deque[Tensor] = deque()
        self.num_samples = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch, logits and labels ``[B]``."""
        # Left on the device: a copy to the host would wait for the step.
        pair = torch.stack([logits.float(), labels.float()])
        self._kept.append(pair)
        self.num_samples += pair.shape[1]
        if self._window is None:
            return
        while self.num_samples - self._kept[0].shape[1] >= self._window:
            self.num_samples -= self._kept.popleft().shape[1]

    def summarize(self) -> Quality | None:
        """Quality over the samples of all ranks, on every rank; None without a sample.

        A collective call.

        Raises:
            RecdError: as ``measure``.
        """
        mine = torch.cat(list(self._kept), dim=1).cpu() if self._kept else torch.zeros(2, 0)
        first = dist.get_rank() == 0
        everyone: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(mine.numpy(), everyone)
        return together(lambda: None if everyone is None else _of_all(everyone))[0]


def _of_all(ranks: Iterable[Any]) -> Quality | None:
    logits, labels = torch.cat([torch.from_numpy(rank) for rank in ranks], dim=1).double()
    return measure(logits, labels) if len(labels) else None


def measure(logits: Tensor, labels: Tensor) -> Quality:
    """Quality over logits and labels ``[N]``, which one rank can ask for alone.

    Raises:
        RecdError: a logit is NaN, which says nothing of its row.
    """
    num_samples = len(labels)
    if unknown := int(logits.isnan().sum()):
        raise RecdError(
            f"the model's logits are NaN in {unknown:,} of {num_samples:,} rows, though its loss "
            "is a number: look at what it returns besides its loss"
        )
    batch: dict[str, Any] = {
        "predictions": {_TASK.name: torch.sigmoid(logits)},
        "labels": {_TASK.name: labels},
        "weights": {_TASK.name: torch.ones_like(labels)},
    }
    values = {}
    # Of them all, NE alone keeps the log loss, and takes a number for "yes".
    for kind, more in ((NEMetric, {"include_logloss": True}), (CalibrationMetric, {})):
        metric = kind(
            world_size=1,
            my_rank=0,
            batch_size=num_samples,
            tasks=[_TASK],
            compute_mode=RecComputeMode.UNFUSED_TASKS_COMPUTATION,
            window_size=num_samples,
            **more,
        )
        metric.update(**batch)
        for name, value in metric.local_compute().items():
            values[name.partition("|")[2]] = float(value)
    # Of one label alone it says nothing, and TorchRec has 1e12.
    told = bool((labels != labels[0]).any())
    return Quality(
        normalized_entropy=values["local_lifetime_ne"] if told else math.nan,
        auc=_auc(logits, labels) if told else math.nan,
        num_samples=num_samples,
        log_loss=values["local_lifetime_logloss"] * math.log(2),  # from bits
        calibration=values["local_lifetime_calibration"],
    )


def _auc(logits: Tensor, labels: Tensor) -> float:
    """Return how often a positive is above a negative; ties (``tie_groups``) count half.

    TorchRec's AUC orders ties by its sort, so it depends on the order of rows and on ranks.
    """
    place = torch.from_numpy(tie_groups(logits.numpy()))
    positives = torch.bincount(place, labels)
    negatives = torch.bincount(place) - positives
    below = negatives.cumsum(0) - negatives
    wins = (positives * (below + negatives / 2)).sum()
    return float(wins / positives.sum() / negatives.sum())

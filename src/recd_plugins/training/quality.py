"""Prediction quality of one label, or of each task of a multi-task model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecComputeMode

from recd_plugins.interfaces.callback import Quality, RegressionQuality
from recd_plugins.interfaces.tasks import Task
from recd_plugins.runtime.errors import RecdError

#: Scores closer than this are ties: 16 float32 roundings, relative for scores above 1.
TOLERANCE = 16 * float(np.finfo(np.float32).eps)
# Maximum width of a tie group, because chains of close scores can span the whole range.
_LONGEST = 2 * TOLERANCE
_TASK = RecTaskInfo(name="label", label_name="label", prediction_name="prediction")


def measure_tasks(tasks: Sequence[Task], logits: Tensor, labels: Tensor) -> Quality:
    """Return the prediction quality of each task over its labelled rows.

    Args:
        tasks: the T tasks.
        logits: ``[N, T]``.
        labels: ``[N, T]``. NaN marks a missing label.
    """
    found: dict[str, Quality | RegressionQuality] = {}
    loss = 0.0
    for task, of_task, all_labels in zip(tasks, logits.unbind(1), labels.unbind(1), strict=True):
        known = ~all_labels.isnan()
        found[task.name] = _measure(task, of_task[known], all_labels[known])
        loss += task.weight * float(task.mean_loss(of_task, all_labels))
    return Quality(math.nan, math.nan, len(labels), tasks=found, loss=loss)


def _measure(task: Task, logits: Tensor, labels: Tensor) -> Quality | RegressionQuality:
    size = len(labels)
    if not task.is_regression:
        if not size:
            return Quality(math.nan, math.nan, 0)
        return measure(logits, task.targets(labels), task.row_weights(labels))
    if not size:
        return RegressionQuality(0, *[math.nan] * 4)
    errors = task.predictions(logits) - labels
    variance = float((labels - labels.mean()).square().mean())
    squared = float(errors.square().mean())
    return RegressionQuality(
        num_samples=size,
        loss=float(task.mean_loss(logits, labels)),
        rmse=math.sqrt(squared),
        mae=float(errors.abs().mean()),
        r2=1 - squared / variance if variance else math.nan,
    )


def measure(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Quality:
    """Return the quality (AUC, normalized entropy and others) of logits and labels ``[N]``.

    ``weights`` ``[N]`` are row weights. They apply to all metrics except the AUC.
    """
    num_samples = len(labels)
    if unknown := int(logits.isnan().sum()):
        raise RecdError(
            f"the model's logits are NaN in {unknown:,} of {num_samples:,} rows, but its loss is "
            "finite. Return the logits from which forward() computes the loss."
        )
    batch: dict[str, Any] = {
        "predictions": {_TASK.name: torch.sigmoid(logits)},
        "labels": {_TASK.name: labels},
        "weights": {_TASK.name: torch.ones_like(labels) if weights is None else weights},
    }
    values = {}
    for metric_class, arguments in ((NEMetric, {"include_logloss": True}), (CalibrationMetric, {})):
        metric = metric_class(
            world_size=1,
            my_rank=0,
            batch_size=num_samples,
            tasks=[_TASK],
            compute_mode=RecComputeMode.UNFUSED_TASKS_COMPUTATION,
            window_size=num_samples,
            **arguments,
        )
        metric.update(**batch)
        for name, value in metric.local_compute().items():
            values[name.partition("|")[2]] = float(value)
    # Undefined if all labels are equal; TorchRec returns 1e12.
    has_both = bool((labels != labels[0]).any())
    return Quality(
        normalized_entropy=values["local_lifetime_ne"] if has_both else math.nan,
        auc=_auc(logits, labels) if has_both else math.nan,
        num_samples=num_samples,
        log_loss=values["local_lifetime_logloss"] * math.log(2),  # from bits
        calibration=values["local_lifetime_calibration"],
        bins=calibration_bins(torch.sigmoid(logits).numpy(), labels.numpy()),
    )


def calibration_bins(
    predictions: NDArray[np.floating], labels: NDArray[np.floating]
) -> tuple[tuple[int, float, float], ...]:
    """Return (count, mean prediction, mean label) per decile of ``[N]`` predictions."""
    edges = np.quantile(predictions, np.linspace(0.1, 0.9, 9))
    bins = np.searchsorted(edges, predictions)
    counts, *sums = (np.bincount(bins, weights) for weights in (None, predictions, labels))
    return tuple(
        (int(count), float(predicted / count), float(observed / count))
        for count, predicted, observed in zip(counts, *sums, strict=True)
        if count
    )


def _auc(logits: Tensor, labels: Tensor) -> float:
    """Return the share of positive-negative pairs in correct order; ties count half.

    Scores in the same group of ``tie_groups`` are ties. TorchRec's AUC breaks ties by sort order,
    so it depends on the order of rows and the number of ranks.
    """
    place = torch.from_numpy(tie_groups(logits.numpy()))
    positives = torch.bincount(place, labels)
    negatives = torch.bincount(place) - positives
    below = negatives.cumsum(0) - negatives
    wins = (positives * (below + negatives / 2)).sum()
    return float(wins / positives.sum() / negatives.sum())


def tie_groups(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the group number of each score. Scores that differ only by rounding share a group.

    The logits of two equal rows can differ in their last bits if the rows have different positions
    in a batch. Neighbours in sorted order closer than ``TOLERANCE`` share a group. A chain of
    neighbours is split into groups at most twice ``TOLERANCE`` wide, so two close scores in a
    longer chain may be in different groups.

    Args:
        scores: logits or other scores ``[N]``; may contain infinite values, but no NaN.

    Returns:
        Group numbers ``[N]``, starting at 0. Larger scores have larger numbers.
    """
    values, place = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    if not len(values):
        return place
    size = np.maximum(1, np.minimum(np.abs(values[1:]), np.abs(values[:-1])))
    starts = np.r_[True, np.diff(values) > TOLERANCE * size]
    first = values[starts][np.cumsum(starts) - 1]
    with np.errstate(invalid="ignore"):  # each infinite score forms a separate group
        cell = (values - first) // (_LONGEST * np.maximum(1, np.abs(first)))
    starts[1:] |= np.diff(np.nan_to_num(cell)) > 0
    groups: NDArray[np.int64] = (np.cumsum(starts) - 1)[place]
    return groups

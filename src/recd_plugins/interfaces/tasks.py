"""Tasks of multi-task training: the labels of a row, their losses and their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

TaskType = Literal["binary", "regression", "weighted"]
TaskLoss = Literal["bce", "mse", "log_mse"]

#: Losses of each type; the first one is the default.
LOSSES: dict[TaskType, tuple[TaskLoss, ...]] = {
    "binary": ("bce",),
    "regression": ("mse", "log_mse"),
    "weighted": ("bce",),
}


@dataclass(frozen=True)
class Task:
    """A prediction task: one label with its type, weight and loss.

    Labels are float32. NaN marks a missing label. Valid values depend on the type:

    - binary: 0 or 1.
    - regression: any finite number; above -1 with loss ``log_mse``.
    - weighted: 0 for a negative row; the row weight, such as watch time, for a positive row.

    Attributes:
        name: name of the task, and of its label column in the rows of the dataset.
        type: type of the label.
        weight: factor of this task's loss in the total loss.
        loss: ``bce`` is the binary cross-entropy of logits, ``mse`` the squared error of the value,
            and ``log_mse`` the squared error of ``log(1 + value)``.
    """

    name: str
    type: TaskType = "binary"
    weight: float = 1.0
    loss: TaskLoss = "bce"

    @property
    def is_regression(self) -> bool:
        return self.type == "regression"

    @property
    def output(self) -> str:
        """Return a description of the values from ``predictions``."""
        if self.is_regression:
            return "the predicted value"
        return "a probability" if self.type == "binary" else "the expected weight of a row"

    def predictions(self, logits: Tensor) -> Tensor:
        """Return a probability (binary), value (regression) or expected weight, ``[B]``."""
        if self.type == "binary":
            return logits.sigmoid()
        if self.type == "weighted":
            return logits.exp()  # the odds, as in Covington et al. 2016, section 4.2
        return logits.expm1() if self.loss == "log_mse" else logits

    def targets(self, labels: Tensor) -> Tensor:
        """Return the target of the loss, ``[B]``: the value for regression, otherwise 0 or 1."""
        if self.type == "weighted":
            return (labels > 0).to(labels.dtype)
        return labels.log1p() if self.loss == "log_mse" else labels

    def row_weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each row, ``[B]``; None unless the task is weighted."""
        return labels.where(labels > 0, labels.new_ones(())) if self.type == "weighted" else None

    def mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar mean loss over the labelled rows, or 0 if no row has a label."""
        from torch.nn import functional as F

        known = ~labels.isnan()
        labels = labels.where(known, labels.new_zeros(()))
        targets = self.targets(labels)
        if self.is_regression:
            losses = (logits - targets).square()
        else:
            losses = F.binary_cross_entropy_with_logits(
                logits, targets, self.row_weights(labels), reduction="none"
            )
        return losses.where(known, losses.new_zeros(())).sum() / known.sum().clamp(min=1)

    def wrong(self, labels: Tensor) -> Tensor:
        """Return a mask, bool ``[B]``: true where a label is present but invalid."""
        if self.is_regression:
            least = -1 if self.loss == "log_mse" else -float("inf")
            valid = (labels > least) & labels.isfinite()
        else:
            valid = (labels >= 0) & (labels <= 1 if self.type == "binary" else labels.isfinite())
        return ~(valid | labels.isnan())

    @property
    def valid_labels(self) -> str:
        """Return a description of valid labels, for error messages."""
        if self.type == "binary":
            return "0 or 1"
        if self.type == "weighted":
            return "a finite number of at least 0"
        return "a finite number above -1" if self.loss == "log_mse" else "a finite number"


def predictions(tasks: Sequence[Task], logits: Tensor) -> Tensor:
    """Return the predictions of all tasks, ``[B, T]``. Without tasks: probabilities, ``[B]``."""
    if not tasks:
        return logits.sigmoid()
    import torch

    columns = zip(tasks, logits.unbind(1), strict=True)
    return torch.stack([task.predictions(each) for task, each in columns], dim=1)


def total_loss(tasks: Sequence[Task], logits: Tensor, labels: Tensor) -> Tensor:
    """Return the weighted sum of the tasks' losses, a scalar.

    Args:
        tasks: the T tasks.
        logits: ``[B, T]``.
        labels: ``[B, T]``. NaN marks a missing label.
    """
    losses = [
        task.weight * task.mean_loss(logits[:, n], labels[:, n]) for n, task in enumerate(tasks)
    ]
    return sum(losses[1:], losses[0])

"""Learning rates that follow a schedule."""

from __future__ import annotations

import math

from torchrec.optim.keyed import CombinedOptimizer

from recd_plugins.registry.training_spec import ScheduleSpec


class LearningRates:
    """The learning rates of an optimizer, step by step.

    Args:
        optimizer: its groups have their rates as they are without a schedule: no checkpoint is
            loaded yet, which has those of its step.
        schedule: None leaves them as they are.
    """

    def __init__(self, optimizer: CombinedOptimizer, schedule: ScheduleSpec | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def factor(self, step: int) -> float:
        """The share of its rate that each has at a step, counted from 0."""
        return 1.0 if self._schedule is None else factor(self._schedule, step)

    def set(self, step: int) -> None:
        """Those of the step that comes, counted from 0; before its ``zero_grad``.

        By that FBGEMM's kernels take theirs, which train in the backward pass.
        """
        if self._schedule is None:
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor(self._schedule, step)


def factor(schedule: ScheduleSpec, step: int) -> float:
    """The share of its learning rate that an optimizer has at a step, counted from 0."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.decay == "none" or schedule.steps is None:
        return 1.0
    done = min((step - schedule.warmup) / (schedule.steps - schedule.warmup), 1.0)
    left = 1 - done if schedule.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.floor + (1 - schedule.floor) * left

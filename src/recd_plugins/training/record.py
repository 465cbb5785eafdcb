"""The losses of a run and its checkpoints, up to its end or to a signal."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from recd_plugins import activity
from recd_plugins.distributed.lookup_kernels import close_kernels
from recd_plugins.errors import RunInterrupted
from recd_plugins.training.assembly import Assembled
from recd_plugins.training.callbacks import Callbacks
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.checkpoint_files import ValidationCurve
from recd_plugins.training.finite import MOST_UNSEEN, FiniteRun
from recd_plugins.training.interrupts import Interrupts
from recd_plugins.training.validation import Validation

if TYPE_CHECKING:
    from torch import Tensor


class Record:
    """What is kept of a run on one rank. All calls are collective.

    Args:
        parts: what is trained.
        finite: what may be kept.
        callbacks: whose states go into checkpoints.
        interrupts: which end the run.
        start: where it begins.
        validation: of the run, None for none.
        checkpoints: where checkpoints go, None for none.
        every: steps between them.

    Attributes:
        losses: the mean over ranks of each step that was looked at; NaN before a checkpoint of a
            trainer that kept none.
    """

    def __init__(
        self,
        parts: Assembled,
        finite: FiniteRun,
        callbacks: Callbacks,
        interrupts: Interrupts,
        start: Progress,
        validation: Validation | None,
        checkpoints: Checkpoints | None,
        every: int,
    ) -> None:
        self._dmp, self._optimizer = parts.dmp, parts.optimizer
        self._finite = finite
        self._callbacks = callbacks
        self._interrupts = interrupts
        self._validation = validation
        # Goes along where nobody validates now, so that the best checkpoint stays.
        self._curve = start.validation
        self._checkpoints = checkpoints
        self._every = every
        self._saved = start.step, self._newest_curve()
        self._pending: list[Tensor] = []
        self.losses = list(start.losses) or [math.nan] * start.step

    def add(self, loss: Tensor) -> None:
        """The loss of a step; the last ones are looked at now and then."""
        self._pending.append(loss)
        if len(self._pending) == MOST_UNSEEN:
            self.look()

    def look(self) -> None:
        """Add what is missing to ``losses``."""
        self.losses += self._finite.losses(self._pending, len(self.losses))

    def settle(self, progress: Progress, *, best: bool = False) -> None:
        """What a step may be followed by: a checkpoint, as of the best so far; the run's end.

        Raises:
            RunInterrupted: a signal ended the run, whose checkpoint is written.
        """
        if best or progress.step % self._every == 0:
            self.save(progress)
        if not (number := self._interrupts.asked()):
            return
        self.save(progress)
        self._callbacks.interrupted(progress.step, signal.Signals(number).name)
        close_kernels(self._dmp)
        newest = None if self._checkpoints is None else self._checkpoints.newest()
        saved = "none is kept, as training.checkpoint.path is not set"
        if newest is not None:
            saved = f"its checkpoint is {newest}"
        dist.barrier()  # one that ends takes the others along
        raise RunInterrupted.by(
            number,
            f"the run was ended after step {progress.step}; {saved}",
            resumable=newest is not None,
        )

    def save(self, progress: Progress) -> None:
        """Write a checkpoint where the run keeps them, unless this step and curve have one."""
        curve = self._newest_curve()
        if self._checkpoints is None or self._saved == (progress.step, curve):
            return
        self.look()
        losses = [] if self.losses and math.isnan(self.losses[0]) else self.losses
        with activity.doing("saving a checkpoint", long=True):
            self._finite.check_state(self._dmp, self._optimizer, progress.step)
            states = self._callbacks.states()
            whole = replace(progress, losses=list(losses), callbacks=states, validation=curve)
            self._checkpoints.save(self._dmp, self._optimizer, whole)
        self._saved = progress.step, curve

    def _newest_curve(self) -> ValidationCurve | None:
        return self._curve if self._validation is None else self._validation.curve

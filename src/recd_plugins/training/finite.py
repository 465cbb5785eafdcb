"""Stops runs whose losses or weights are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.rank_agreement import together
from recd_plugins.training.checkpoint import Checkpoints

#: Steps between checks for NaN losses. A checkpoint checks earlier.
MOST_UNSEEN = 50
_ROWS_AT_ONCE = 65_536
_ADVICE = "Lower training.learning_rate, or check dense features, labels and initial weights"


@dataclass(frozen=True)
class FiniteRun:
    """Stops a run with an error before it saves NaN or infinite losses or weights.

    All ranks must call each method together; either all ranks continue or all raise.
    """

    name: str
    checkpoints: Checkpoints | None = None

    def losses(self, pending: list[Tensor], before: int = 0, of: str = "") -> list[float]:
        """Return the mean loss over ranks of each step in ``pending``, and clear ``pending``.

        ``before`` is the number of earlier steps. ``of`` is text after "step N" in errors.
        """
        if not pending:
            return []
        stacked = torch.stack(pending).double().cpu()
        pending.clear()
        dist.all_reduce(stacked)
        means: list[float] = (stacked / dist.get_world_size()).tolist()
        for step, loss in enumerate(means, before + 1):
            if not math.isfinite(loss):
                raise self._ended(f"the loss of step {step}{of} is {loss}")
        return means

    def check_state(self, dmp: DistributedModelParallel, optimizer: Optimizer, step: int) -> None:
        """Raise an error if the state for the checkpoint of ``step`` is not finite."""
        if (name := _not_finite(dmp, optimizer)) is not None:
            raise self._ended(f"{name} has a NaN or infinite value after step {step}")

    def _ended(self, what: str) -> RecdError:
        ends = f"{self.name}: {what}, so the run stopped without saving a checkpoint"
        newest = None if self.checkpoints is None else self.checkpoints.newest()
        if newest is None:
            return RecdError(f"{ends}. {_ADVICE}.")
        return RecdError(
            f"{ends}. {_ADVICE}. Then resume from the newest checkpoint, {newest}, with --resume."
        )


def _not_finite(dmp: DistributedModelParallel, optimizer: Optimizer) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value on any rank, or None."""
    named = {f"weight {name}": value for name, value in dmp.state_dict().items()}
    for name, state in optimizer.state_dict()["state"].items():
        named |= {f"optimizer state {name} {key}": value for key, value in state.items()}
    mine = next((name for name, value in named.items() if not _all_finite(value)), None)
    return next((name for name in together(lambda: mine) if name is not None), None)


def _all_finite(value: Any) -> bool:
    sharded = isinstance(value, ShardedTensor)
    for tensor in [shard.tensor for shard in value.local_shards()] if sharded else [value]:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        numbers = tensor.detach()
        # A sum with NaN or inf is not finite, but a sum of large numbers may overflow too. Only
        # then test all elements, in chunks because isfinite allocates a copy.
        parts = torch.split(numbers, _ROWS_AT_ONCE) if numbers.dim() else (numbers,)
        if not math.isfinite(numbers.sum()) and not all(part.isfinite().all() for part in parts):
            return False
    return True

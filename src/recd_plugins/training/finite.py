"""Losses and weights that are NaN or infinite end a run before they are saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.errors import RecdError
from recd_plugins.training.checkpoint import Checkpoints

#: Steps after which losses are looked at, where no checkpoint is due before.
MOST_UNSEEN = 50
_ROWS_AT_ONCE = 65_536
_ADVICE = "Lower training.learning_rate, or keep dense features small by preprocessing"
_BEFORE_LEARNING = (
    "Nothing has learned before it: look at dense features and labels, at the first weights, and "
    "at what poolings and layers of plugins give"
)


@dataclass(frozen=True)
class FiniteRun:
    """What may be saved of a run. All calls are collective: all ranks go on, or all raise.

    Args:
        name: of the run, for errors.
        checkpoints: of the run, None where it keeps none.
    """

    name: str
    checkpoints: Checkpoints | None = None

    def losses(self, pending: list[Tensor], before: int = 0, of: str = "") -> list[float]:
        """The losses of the same steps, averaged over ranks; empties the list.

        Args:
            pending: of this rank, scalars.
            before: steps before them.
            of: what they are steps of, where that is not training.

        Raises:
            RecdError: one is not finite; names its step and the newest checkpoint.
        """
        means = mean_over_ranks(pending)
        for step, loss in enumerate(means, before + 1):
            if not math.isfinite(loss):
                advice = _BEFORE_LEARNING if step == 1 and not of else _ADVICE
                raise self._ended(f"the loss of step {step}{of} is {loss}", advice)
        return means

    def check_state(self, dmp: DistributedModelParallel, optimizer: Optimizer, step: int) -> None:
        """Look at all that a checkpoint of ``step`` would hold, in one pass over it.

        Raises:
            RecdError: a weight, or a number of the optimizer, is not finite; names it.
        """
        if (name := _not_finite(dmp, optimizer)) is not None:
            raise self._ended(f"after step {step} {name} has a value that is NaN or infinite")

    def check_loaded(self, dmp: DistributedModelParallel, optimizer: Optimizer) -> None:
        """Look at what came from the newest checkpoint.

        Raises:
            RecdError: likewise; older versions saved that.
        """
        if (name := _not_finite(dmp, optimizer)) is not None:
            raise RecdError(
                f"{self._newest()}: {name} has a value that is NaN or infinite; remove this "
                "checkpoint to go on from the one before"
            )

    def _ended(self, what: str, advice: str = _ADVICE) -> RecdError:
        newest = self._newest()
        saved = (
            "no checkpoint was saved" if newest is None else f"the newest checkpoint is {newest}"
        )
        again = "" if newest is None else ", and go on from there with --resume"
        return RecdError(
            f"{self.name}: {what}, so the run ends here and saves nothing more; {saved}. {advice}"
            f"{again}"
        )

    def _newest(self) -> Any:
        return None if self.checkpoints is None else self.checkpoints.newest()


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """The losses of the same steps, averaged over ranks; empties the list. A collective call."""
    if not losses:
        return []
    stacked = torch.stack(losses).double().cpu()
    losses.clear()
    dist.all_reduce(stacked)
    means: list[float] = (stacked / dist.get_world_size()).tolist()
    return means


def _not_finite(dmp: DistributedModelParallel, optimizer: Optimizer) -> str | None:
    """The first tensor with such a value on any rank."""
    named = _tensors(dmp.state_dict(), optimizer.state_dict()["state"])
    mine = next((name for name, tensor in named if not _all_finite(tensor)), None)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((name for name in everyone if name is not None), None)


def _all_finite(numbers: Tensor) -> bool:
    # A sum over NaN or inf is not finite; that of large numbers, or of many in 16 bits, need not be
    # either. In parts then, as what is tested is copied.
    if math.isfinite(numbers.sum()):
        return True
    parts = torch.split(numbers, _ROWS_AT_ONCE) if numbers.dim() else (numbers,)
    return all(bool(part.isfinite().all()) for part in parts)


def _tensors(weights: dict[str, Any], states: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Numbers of this rank, by name."""
    named = [("weight", name, value) for name, value in weights.items()]
    for name, state in states.items():
        named += [("optimizer state", f"{name} {key}", value) for key, value in state.items()]
    for what, name, value in named:
        shards = (
            [shard.tensor for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else [value]
        )
        for tensor in shards:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                yield f"{what} {name}", tensor.detach()

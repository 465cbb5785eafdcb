"""End a run before it saves losses or weights that are NaN or infinite."""

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

from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.checkpoint import Checkpoints

#: Steps between looks at the losses, unless a checkpoint is due before.
MOST_UNSEEN = 50
_ROWS_AT_ONCE = 65_536
_ADVICE = "Lower training.learning_rate, or keep dense features small by preprocessing"
_BEFORE_LEARNING = (
    "Nothing has learned before it: look at dense features and labels, at the first weights, and "
    "at what poolings and layers of plugins give"
)


@dataclass(frozen=True)
class FiniteRun:
    """Checks of what may be saved. All calls are collective: all ranks go on, or all raise."""

    name: str
    checkpoints: Checkpoints | None = None

    def losses(self, pending: list[Tensor], before: int = 0, of: str = "") -> list[float]:
        """Average the losses of the same steps over ranks; empties the list."""
        if not pending:
            return []
        stacked = torch.stack(pending).double().cpu()
        pending.clear()
        dist.all_reduce(stacked)
        means: list[float] = (stacked / dist.get_world_size()).tolist()
        for step, loss in enumerate(means, before + 1):
            if not math.isfinite(loss):
                advice = _BEFORE_LEARNING if step == 1 and not of else _ADVICE
                raise self._ended(f"the loss of step {step}{of} is {loss}", advice)
        return means

    def check_state(self, dmp: DistributedModelParallel, optimizer: Optimizer, step: int) -> None:
        """Check what a checkpoint of ``step`` would hold."""
        if (name := _not_finite(dmp, optimizer)) is not None:
            raise self._ended(f"after step {step} {name} has a value that is NaN or infinite")

    def check_loaded(self, dmp: DistributedModelParallel, optimizer: Optimizer) -> None:
        """Check what came from the newest checkpoint; see ``check_state``."""
        if (name := _not_finite(dmp, optimizer)) is not None:
            raise RecdError(
                f"{self._newest()}: {name} has a value that is NaN or infinite; remove this "
                "checkpoint to go on from the one before"
            )

    def _ended(self, what: str, advice: str = _ADVICE) -> RecdError:
        newest = self._newest()
        saved, again = "no checkpoint was saved", ""
        if newest is not None:
            saved = f"the newest checkpoint is {newest}"
            again = ", and go on from there with --resume"
        return RecdError(
            f"{self.name}: {what}, so the run ends here and saves nothing more; {saved}. {advice}"
            f"{again}"
        )

    def _newest(self) -> Any:
        return None if self.checkpoints is None else self.checkpoints.newest()


def _not_finite(dmp: DistributedModelParallel, optimizer: Optimizer) -> str | None:
    """Return the first tensor with such a value on any rank."""
    named = _tensors(dmp.state_dict(), optimizer.state_dict()["state"])
    mine = next((name for name, tensor in named if not _all_finite(tensor)), None)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((name for name in everyone if name is not None), None)


def _all_finite(numbers: Tensor) -> bool:
    # A sum over NaN or inf is not finite; the sum of large numbers need not be either. They are
    # tested in parts then, as isfinite copies them.
    if math.isfinite(numbers.sum()):
        return True
    parts = torch.split(numbers, _ROWS_AT_ONCE) if numbers.dim() else (numbers,)
    return all(bool(part.isfinite().all()) for part in parts)


def _tensors(weights: dict[str, Any], states: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    named = [(f"weight {name}", value) for name, value in weights.items()]
    for name, state in states.items():
        named += [(f"optimizer state {name} {key}", value) for key, value in state.items()]
    for name, value in named:
        sharded = isinstance(value, ShardedTensor)
        for tensor in [shard.tensor for shard in value.local_shards()] if sharded else [value]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                yield name, tensor.detach()

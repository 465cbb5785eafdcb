"""What each rank does: a trainer as it is and with its three lines, in turns."""

from __future__ import annotations

import gc
import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recd_plugin_recd.benchmarks.drop_in_parts.three_lines import Side, trainer_module
from recd_plugin_recd.benchmarks.drop_in_parts.trainers.session_data import Size, Trainer
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.model import copy_weights
from recd_plugins.testing.benchmark import keep_freed_memory

SIDES: Sequence[Side] = ("stock", "ours")


@dataclass(frozen=True)
class Job:
    """What is measured; travels to the ranks by pickle.

    Attributes:
        trainer: its name.
        size: how large it is.
        rows_per_session: on average; with 1 there is nothing to deduplicate.
        turns: of both sides; one more warms up.
        steps: of a turn.
        options: further ones of the trainer's ``build``.
    """

    trainer: str
    size: Size
    rows_per_session: int
    turns: int
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """One side, over all ranks.

    Attributes:
        seconds: of a step, by turn.
        processor_seconds: of a step, by turn, of all ranks together.
        losses: by step, the mean over ranks.
        said: what the side said by logging, of this rank.
    """

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def measure(rank: int, world_size: int, job: Job) -> dict[Side, Measured]:  # noqa: ARG001
    """Both sides of a trainer. A collective call."""
    silence_upstream()
    keep_freed_memory()
    found = {side: Measured() for side in SIDES}
    handler = logging.Handler()
    handler.emit = lambda record: found["ours"].said.append(  # type: ignore[method-assign]
        record.getMessage()
    )
    logger = logging.getLogger("recd_plugins.drop_in")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        trainers = {side: _build(job, side) for side in SIDES}
        losses: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
        gc.collect()
        for turn in range(job.turns + 1):
            for side, trainer in trainers.items():
                seconds, processor_seconds = _turn(trainer, job.steps, losses[side])
                if turn:
                    found[side].seconds.append(seconds)
                    found[side].processor_seconds.append(processor_seconds)
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
    for side in SIDES:
        found[side].losses = _mean(losses[side])
    return found


def losses_one_rounding_off(rank: int, world_size: int, job: Job) -> list[float]:  # noqa: ARG001
    """Of the stock trainer, where one weight of a layer begins one rounding off. A collective call.

    What makes its losses another trainer's is what rounding comes to in so many steps.
    """
    silence_upstream()
    trainer = _build(job, "stock")
    dense = (p for n, p in trainer.dmp.named_parameters() if ".t_" not in n and p.dim() == 2)
    weight = next(dense).detach().view(-1)
    weight[0] = torch.nextafter(weight[0], torch.tensor(1.0))
    losses = [trainer.step().detach() for _ in range((job.turns + 1) * job.steps)]
    return _mean(losses)


def _mean(losses: list[Tensor]) -> list[float]:
    """Over ranks, by step."""
    stacked = torch.stack(losses).double()
    dist.all_reduce(stacked)
    return [float(loss) for loss in stacked / dist.get_world_size()]


def _build(job: Job, side: Side) -> Trainer:
    """A trainer on weights that are the same on any plan."""
    torch.manual_seed(0)
    module = trainer_module(job.trainer, side)
    trainer: Trainer = module.build(job.size, job.rows_per_session, **job.options)
    state = trainer.dmp.state_dict()
    copy_weights(state, {name: _drawn(name, tensor) for name, tensor in state.items()})
    trainer.dmp.load_state_dict(state)
    return trainer


def _drawn(name: str, tensor: Any) -> Tensor:
    # Tables of data_parallel are whole, and drawn anew by TorchRec, too.
    if not isinstance(tensor, ShardedTensor) and ".t_" not in name:
        return tensor.detach().clone()
    table = name.split(".")[-2]  # what is around it may be another module on each side
    generator = torch.Generator().manual_seed(zlib.crc32(table.encode()))
    return torch.rand(tensor.size(), generator=generator) / 10 - 0.05


def _turn(trainer: Trainer, steps: int, losses: list[Tensor]) -> tuple[float, float]:
    """Seconds of a step, and of the processor of all ranks together; the same on every rank."""
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        losses.append(trainer.step().detach())
    dist.barrier()
    spent = torch.tensor(
        [time.perf_counter() - start, time.process_time() - processor], dtype=torch.float64
    )
    dist.all_reduce(spent)
    return float(spent[0]) / steps / dist.get_world_size(), float(spent[1]) / steps

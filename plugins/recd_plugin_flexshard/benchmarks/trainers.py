"""Trainers that live in the same ranks, over batches that go round."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugins.api.batches import ModelInput
from recd_plugins.api.distributed import CollectiveBytes, Traffic
from recd_plugins.api.training import build_train_pipeline

T = TypeVar("T")
CPU = torch.device("cpu")


class RankTrainer:
    """One sharded model on this rank, trained by TorchRec's pipeline.

    Args:
        dmp: the sharded model.
        optimizer: over all of its parameters.
        batches: of this rank; they go round.

    Attributes:
        batches: likewise.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        batches: Sequence[ModelInput],
    ) -> None:
        self.dmp = dmp
        self.batches = batches
        self._around: Iterator[Any] = cycle(batches)
        self._pipeline = build_train_pipeline(dmp, optimizer, CPU)
        self._losses: list[Tensor] = []
        dmp.train()

    def step(self) -> None:
        """One step."""
        loss, _, _ = self._pipeline.progress(self._around)
        self._losses.append(loss)

    def counted_steps(self, num: int) -> dict[Traffic, float]:
        """Bytes that this rank sends in a step, the mean of ``num`` steps."""
        counter = CollectiveBytes()
        with counter:
            for _ in range(num):
                self.step()
        return {traffic: sent / num for traffic, sent in counter.sent.items()}

    def counted_round(self) -> dict[Traffic, float]:
        """The same of one step on each batch, after one that fills the pipeline.

        Whatever the pipeline reads ahead, every batch is then sent once.
        """
        self.step()
        return self.counted_steps(len(self.batches))

    def timed_step(self) -> float:
        """Seconds of one step, of the rank that takes longest. A collective call."""
        dist.barrier()
        start = time.perf_counter()
        self.step()
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)

    @property
    def num_ids(self) -> float:
        """Ids of sequences in a batch of this rank, the mean."""
        sequences = [batch.sequence_features for batch in self.batches]
        return sum(kjt.values().numel() for kjt in sequences if kjt is not None) / len(sequences)

    def losses(self) -> list[float]:
        """Losses by step, the mean over ranks. A collective call."""
        stacked = torch.stack(self._losses).double()
        dist.all_reduce(stacked)
        return (stacked / dist.get_world_size()).tolist()


def timed_turns(trainers: Mapping[str, RankTrainer], turns: int) -> dict[str, list[float]]:
    """Seconds of a step of each trainer, by turn; one more turn warms up. A collective call."""
    # Everything that is there stays: collecting garbage need not go through it.
    gc.collect()
    gc.disable()
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns + 1):
        for name, trainer in trainers.items():
            spent = trainer.timed_step()
            if turn:
                seconds[name].append(spent)
    gc.enable()
    return seconds


def from_every_rank(value: T) -> list[T]:
    """What each rank has. A collective call."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone

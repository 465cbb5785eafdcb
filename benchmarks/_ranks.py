"""Trainer for benchmarks that train several models in the same ranks, in alternating turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._measure import mean_over_ranks


class RankTrainer:
    """One sharded model on this rank, trained by a pipeline of TorchRec or of recd-plugins.

    The batches of this rank are repeated.
    """

    def __init__(self, pipeline: Any, batches: Sequence[Any], device: torch.device) -> None:
        self.batches = batches
        self._pipeline = pipeline
        self._around: Iterator[Any] = cycle(batches)
        self._device = device
        self._losses: list[Tensor] = []

    def steps(self, count: int) -> None:
        """Run ``count`` training steps and wait until they finish."""
        for _ in range(count):
            loss, _, _ = self._pipeline.progress(self._around)
            self._losses.append(loss.detach())
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def turn(self, steps: int, warmup: int = 1) -> tuple[float, float]:
        """Time ``steps`` training steps. Collective.

        Returns:
            Wall seconds per step on the slowest rank, and CPU seconds per step on this rank.
        """
        self.steps(warmup)
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        self.steps(steps)
        dist.barrier()
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        processor = time.process_time() - processor
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent) / steps, processor / steps

    def losses(self) -> list[float]:
        """Return the loss of each step so far, averaged over ranks. Collective."""
        return mean_over_ranks(self._losses)

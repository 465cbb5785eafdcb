"""Speed, bytes and ids of training steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recd_plugins.distributed.byte_counter import CollectiveBytes, lookup_ids

# Batches that TrainPipelineSparseDist distributes before it trains on them.
_READ_AHEAD = 2


class Meter:
    """Takes steps one by one: the first fills the pipeline, a few are counted, the rest timed.

    Counting slows a step down, so no step is both counted and timed.
    """

    COUNTED_STEPS = 4

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._step = 0
        self._bytes = CollectiveBytes()
        self._ids = 0
        self._seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one training step."""
        self._step += 1
        if self._step == 1:
            yield
        elif self._step <= 1 + self.COUNTED_STEPS:
            with self._bytes, lookup_ids(self._model) as ids:
                yield
            self._ids += ids.total
        else:
            start = time.perf_counter()
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds.append(time.perf_counter() - start)

    @property
    def step_seconds(self) -> float | None:
        """Median wall time of a step."""
        return statistics.median(self._seconds) if self._seconds else None

    def samples_per_second(self, samples_per_step: int) -> float | None:
        """Throughput over the timed steps together, reading included."""
        if not self._seconds:
            return None
        return samples_per_step * len(self._seconds) / sum(self._seconds)

    def per_step(self) -> tuple[dict[str, float], float] | None:
        """Bytes this rank sends by kind of collective, and ids it looks up, in one step.

        None for a run so short that the counted steps ran out of batches to read ahead.
        """
        if self._step < 1 + self.COUNTED_STEPS + _READ_AHEAD:
            return None
        by_kind = {kind: num / self.COUNTED_STEPS for kind, num in self._bytes.by_kind().items()}
        return by_kind, self._ids / self.COUNTED_STEPS


def sum_by_kind(per_rank: list[dict[str, Any]]) -> dict[str, float]:
    """Add up what ranks report."""
    kinds = sorted({kind for rank in per_rank for kind in rank})
    return {kind: sum(rank.get(kind, 0) for rank in per_rank) for kind in kinds}

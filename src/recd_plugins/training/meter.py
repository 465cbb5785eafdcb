"""Speed, bytes and ids of training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from recd_plugins.clock import clock_of
from recd_plugins.distributed.byte_counter import CollectiveBytes, Kind, lookup_ids

# Batches that TrainPipelineSparseDist distributes before it trains on them.
_READ_AHEAD = 2


@dataclass(frozen=True)
class Counted:
    """What one rank did in one step.

    Attributes:
        sent: bytes by kind of collective.
        sent_by_tier: bytes of those collectives that belong to a tier, by tier.
        ids: that entered its lookups.
    """

    sent: dict[str, float]
    sent_by_tier: dict[str, float]
    ids: float


class Meter:
    """Takes steps one by one: the first fills the pipeline, a few are counted, the rest timed.

    Counting slows a step down, so no step is both counted and timed.

    Args:
        model: sharded.
        device: of this rank.
        tiers: tier by name of its process group and kind of its collectives, where the model has
            tiers.
    """

    COUNTED_STEPS = 4

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        tiers: Mapping[tuple[str, Kind], str] | None = None,
    ) -> None:
        self._model = model
        self._tiers = tiers or {}
        self._clock = clock_of(device)
        self._step = 0
        self._bytes = CollectiveBytes()
        self._ids = 0
        self._spans: list[tuple[Any, Any]] = []

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
            start = self._clock.mark()
            yield
            self._spans.append((start, self._clock.mark()))

    def step_seconds(self) -> list[float]:
        """Wall time of each timed step, reading included."""
        return [self._clock.seconds(start, end) for start, end in self._spans]

    def per_step(self) -> Counted | None:
        """What this rank did in one step, the mean of those counted.

        None for a run so short that the counted steps ran out of batches to read ahead.
        """
        if self._step < 1 + self.COUNTED_STEPS + _READ_AHEAD:
            return None
        by_tier = Counter[str]()
        for traffic, num_bytes in self._bytes.sent.items():
            if (tier := self._tiers.get((traffic.group, traffic.kind))) is not None:
                by_tier[tier] += num_bytes
        return Counted(
            self._mean(self._bytes.by_kind()), self._mean(by_tier), self._ids / self.COUNTED_STEPS
        )

    def _mean(self, totals: Mapping[str, int]) -> dict[str, float]:
        return {name: total / self.COUNTED_STEPS for name, total in totals.items()}


def sum_by_kind(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add up what ranks report."""
    kinds = sorted({kind for rank in per_rank for kind in rank})
    return {kind: sum(rank.get(kind, 0) for rank in per_rank) for kind in kinds}

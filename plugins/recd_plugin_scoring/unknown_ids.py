"""Ids that training has not numbered, counted while others are scored."""

from __future__ import annotations

import click
import torch.distributed as dist

from recd_plugins.api import MOST_UNKNOWN
from recd_plugins.api.batches import fitted_steps
from recd_plugins.api.registry import Registry


class UnknownIds:
    """Sets of the ids of each feature that its preprocessing meets from now on and does not know.

    Args:
        registry: whose preprocessing is fitted.
    """

    def __init__(self, registry: Registry) -> None:
        self._features: dict[str, set[int]] = {}
        for feature, steps in fitted_steps(registry, registry.dataset.schema()).items():
            for step in steps:
                if step.num_ids is None:
                    continue
                if step.unknown_ids is None:  # which features that share a vocabulary share
                    step.unknown_ids = set()
                self._features[feature] = step.unknown_ids

    def say(self) -> None:
        """Say on rank 0 how many there are on all ranks. A collective call."""
        everyone: list[dict[str, set[int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, self._features)
        if dist.get_rank():
            return
        counts = {
            name: len(set().union(*(each[name] for each in everyone))) for name in everyone[0]
        }
        told = [f"{name} {_count(count)}" for name, count in counts.items() if count]
        if told:
            click.echo(
                f"ids that training has not numbered, scored as unknown ones: {', '.join(told)}",
                err=True,
            )


def _count(count: int) -> str:
    return f"{count:,}" if count < MOST_UNKNOWN else f"{MOST_UNKNOWN:,} or more"

"""Ids that training has not numbered, counted while others are scored."""

from __future__ import annotations

import click
import torch.distributed as dist

from recd_plugins.api import MOST_UNKNOWN, Preprocessing
from recd_plugins.api.batches import fitted_steps
from recd_plugins.api.registry import RunConfig


class UnknownIds:
    """Sets of the ids of each feature that its preprocessing meets from now on and does not know.

    Args:
        registry: whose preprocessing is fitted.
        readers: what preprocesses in other processes, where nothing is counted; None for this one.
    """

    def __init__(self, registry: RunConfig, readers: str | None = None) -> None:
        self._readers = readers
        shared: dict[int, tuple[list[str], set[int]]] = {}
        schema = registry.dataset.schema()
        for feature, steps in fitted_steps(registry, schema).items():
            if feature not in schema.sparse:  # numbers are no ids
                continue
            for step in steps:
                if type(step).fit is Preprocessing.fit:
                    continue
                if step.unknown_ids is None:  # which features that share a vocabulary share
                    step.unknown_ids = set()
                shared.setdefault(id(step.unknown_ids), ([], step.unknown_ids))[0].append(feature)
        self._features: dict[str, list[set[int]]] = {}  # of a feature with two such steps, two
        for features, ids in shared.values():
            self._features.setdefault(_joined(features), []).append(ids)

    def say(self) -> None:
        """Say on rank 0 how many there are on all ranks, or why nobody knows. A collective call."""
        if self._readers is not None:
            if self._features and dist.get_rank() == 0:
                click.echo(
                    "ids that training has not numbered are not counted, as "
                    f"{self._readers} works in processes of its own",
                    err=True,
                )
            return
        everyone: list[dict[str, set[int]]] = [{}] * dist.get_world_size()
        mine = {name: set[int]().union(*ids) for name, ids in self._features.items()}
        dist.all_gather_object(everyone, mine)
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


def _joined(features: list[str]) -> str:
    return features[0] if len(features) == 1 else f"{' and '.join(features)} together"


def _count(count: int) -> str:
    return f"{count:,}" if count < MOST_UNKNOWN else f"{MOST_UNKNOWN:,} or more"

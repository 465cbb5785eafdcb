"""Ranks that decide together: what one knows, or fails by, all of them know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from recd_plugins.distributed.nodes import ranks_of_each_node
from recd_plugins.distributed.rank_agreement import check_agreement

T = TypeVar("T")


def check_started_alike(device: str, asked: Mapping[str, Any]) -> None:
    """Refuse what was started otherwise on some rank of torchrun. A collective call, the first one.

    Args:
        device: ``cpu`` or ``cuda``, as chosen here.
        asked: options of the command that have to be the same.

    Raises:
        SetupError: on all ranks: what differs; or nodes have different numbers of ranks.
    """
    ranks_of_each_node()
    decided = {"what training.device comes to": device, "options of the command": dict(asked)}
    check_agreement("starting", decided)


def from_rank_0(value: T) -> T:
    """Rank 0's value on every rank. A collective call."""
    chosen = [value]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def together(step: Callable[[], T]) -> list[T]:
    """What ``step`` gives on each rank. A collective call, also where it fails on one of them.

    Raises:
        Exception: the failure of the first rank on which it failed, on all of them.
    """
    outcome: T | Exception
    try:
        outcome = step()
    except Exception as error:
        outcome = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for each in outcomes:
        if isinstance(each, Exception):
            raise each
    return outcomes

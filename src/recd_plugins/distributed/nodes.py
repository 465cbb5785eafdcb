"""Which ranks share a node."""

from __future__ import annotations

import os

import torch.distributed as dist

from recd_plugins.errors import SetupError


def ranks_of_each_node() -> int:
    """Ranks a node, ``LOCAL_WORLD_SIZE`` consecutive ones; all where it is not set. Collective.

    Raises:
        SetupError: nodes have different numbers of ranks.
    """
    world_size = dist.get_world_size()
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    of_all: list[int] = [0] * world_size
    dist.all_gather_object(of_all, mine)
    if len(set(of_all)) > 1 or mine < 1 or world_size % mine:
        raise SetupError(
            f"{world_size} ranks on nodes of {', '.join(map(str, sorted(set(of_all))))} ranks "
            "(LOCAL_WORLD_SIZE): start as many ranks on every node"
        )
    return mine


def crosses_links() -> bool:
    """Whether ranks are on several nodes: not where ``LOCAL_WORLD_SIZE`` is not set."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size

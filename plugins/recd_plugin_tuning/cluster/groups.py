"""The process groups that are measured: of all ranks, of nodes, and across nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from recd_plugins.api import new_group, ranks_of_each_node


@dataclass(frozen=True)
class NodeGroups:
    """Where this rank is, and whom it measures with.

    Attributes:
        rank: this one.
        nodes: nodes.
        ranks_per_node: of each.
        everyone: all ranks.
        node: the ranks of this node.
        across: the ranks with this one's place in their nodes.
    """

    rank: int
    nodes: int
    ranks_per_node: int
    everyone: dist.ProcessGroup
    node: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.nodes * self.ranks_per_node


@contextmanager
def node_groups() -> Iterator[NodeGroups]:
    """The groups of this process group's ranks, for the time of a context. Collective.

    Raises:
        SetupError: nodes have different numbers of ranks.
    """
    per_node, world_size, rank = ranks_of_each_node(), dist.get_world_size(), dist.get_rank()
    everyone = list(range(world_size))
    nodes = [everyone[first : first + per_node] for first in everyone[::per_node]]
    # Every rank makes every group, its own or not.
    whole = new_group(everyone)
    inside = [new_group(ranks) for ranks in nodes][rank // per_node]
    across = [new_group(everyone[place::per_node]) for place in range(per_node)][rank % per_node]
    yield NodeGroups(rank, len(nodes), per_node, whole, inside, across)
    # Their threads cost. Not after an error, when nobody answers.
    for group in (whole, inside, across):
        dist.destroy_process_group(group)

"""The process groups of the tiers."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from recd_plugins.api import new_group, ranks_of_each_node


@dataclass(frozen=True)
class TierGroups:
    """One group for the collectives of each tier, so that their traffic can be told apart.

    Attributes:
        cold: all ranks; the all-to-alls of the sharded tables.
        hot: all ranks; the all-reduce of the hot rows' gradients.
        flex: the ranks of this node; the all-to-alls of the flex rows.
        flex_gradients: the ranks of all nodes that hold the same flex rows; the all-reduce of their
            gradients.
    """

    cold: dist.ProcessGroup
    hot: dist.ProcessGroup
    flex: dist.ProcessGroup
    flex_gradients: dist.ProcessGroup

    @property
    def names(self) -> dict[str, str]:
        """Tier by group name, as ``CollectiveBytes`` has them."""
        return {
            self.cold.group_name: "cold",
            self.hot.group_name: "hot",
            self.flex.group_name: "flex",
            self.flex_gradients.group_name: "flex_gradients",
        }


# By the default process group. When that is destroyed they go, and their threads with them.
_made: WeakKeyDictionary[dist.ProcessGroup, TierGroups] = WeakKeyDictionary()


def tier_groups() -> TierGroups:
    """Return the groups of the default process group; the first call is collective.

    A node is ``LOCAL_WORLD_SIZE`` consecutive ranks, as in TorchRec.
    """
    world = dist.group.WORLD
    assert world is not None, "call torch.distributed.init_process_group first"
    if world not in _made:
        _made[world] = _make_groups(dist.get_rank(), dist.get_world_size())
    return _made[world]


def _make_groups(rank: int, world_size: int) -> TierGroups:
    per_node = ranks_of_each_node()
    num_nodes = world_size // per_node
    everyone = list(range(world_size))
    nodes = [everyone[node * per_node : (node + 1) * per_node] for node in range(num_nodes)]
    across = [everyone[local::per_node] for local in range(per_node)]
    cold, hot = (new_group(everyone) for _ in range(2))
    # Every rank makes every group, its own or not.
    flex = [new_group(ranks) for ranks in nodes]
    flex_gradients = [new_group(ranks) for ranks in across]
    return TierGroups(cold, hot, flex[rank // per_node], flex_gradients[rank % per_node])

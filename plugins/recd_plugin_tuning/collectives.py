"""Measures latency and bandwidth of the collectives of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from recd_plugin_tuning.rank_work import Effort, goes_on, rounds
from recd_plugins.api import rank_agreement, stage_costs


@dataclass(frozen=True)
class NodeGroups:
    """Process groups of this rank: all ranks, its node, and its local rank on all nodes."""

    rank: int
    nodes: int
    ranks_per_node: int
    everyone: dist.ProcessGroup
    node: dist.ProcessGroup
    across: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


@contextmanager
def node_groups() -> Iterator[NodeGroups]:
    """Context manager that creates the process groups of nodes. Collective call."""
    per_node = rank_agreement.ranks_of_each_node()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    everyone = list(range(world_size))
    nodes = [everyone[first : first + per_node] for first in everyone[::per_node]]
    # Every rank must create every group.
    whole = rank_agreement.new_group(everyone)
    inside = [rank_agreement.new_group(ranks) for ranks in nodes][rank // per_node]
    across = [rank_agreement.new_group(everyone[place::per_node]) for place in range(per_node)][
        rank % per_node
    ]
    yield NodeGroups(rank, len(nodes), per_node, whole, inside, across)
    # Shut the groups down to end their threads. After an error, other ranks may not respond.
    for group in (whole, inside, across):
        dist.destroy_process_group(group)


#: Descriptions of the collectives of ``CollectiveRates``.
NAMES = {
    "a2a_global": "all-to-all, all ranks",
    "a2a_intra": "all-to-all, in a node",
    "ar_global": "all-reduce, all ranks",
    "ar_cross": "all-reduce, across nodes",
}
# Number of the largest sizes to which the bandwidth is fitted.
_LARGEST = 3

#: Maps each collective to its seconds by bytes per rank.
Sweeps = Mapping[str, Mapping[int, float]]
_Collective = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work]


def sweep(
    groups: NodeGroups, device: torch.device, effort: Effort, say: Callable[[str], None]
) -> dict[str, dict[int, float]]:
    """Time each collective for several sizes. Return seconds keyed by collective and bytes.

    Groups of the same kind, such as all nodes, run at the same time. Collective call.
    """
    kinds: dict[str, tuple[_Collective, dist.ProcessGroup]] = {
        "a2a_global": (_all_to_all, groups.everyone),
        "a2a_intra": (_all_to_all, groups.node),
        "ar_global": (_all_reduce, groups.everyone),
        "ar_cross": (_all_reduce, groups.across),
    }
    found: dict[str, dict[int, float]] = {}
    for name, (collective, group) in kinds.items():
        say(NAMES[name])
        collective(_values(effort.sizes[0], group, device), group).wait()  # connects the ranks
        of_kind = found[name] = dict[int, float]()
        for size in effort.sizes:
            last = max(of_kind, default=0)
            if last and not goes_on(size, last, of_kind[last], effort):
                break
            values = _values(size, group, device)
            run = _waiting(collective, values, group)
            of_kind[size] = rounds(run, device, effort)
    return found


def _waiting(
    collective: _Collective, values: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    return lambda: collective(values, group).wait()


def fit_rates(sweeps: Sweeps) -> stage_costs.CollectiveRates:
    """Fit latency and bandwidth of each collective to its times."""
    return stage_costs.CollectiveRates(**{name: fit_rate(each) for name, each in sweeps.items()})


def fit_rate(seconds: Mapping[int, float]) -> stage_costs.CollectiveRate:
    """Fit latency and bandwidth to ``seconds``, keyed by bytes.

    The bandwidth is the median slope between the largest sizes, because rate-limited links let
    the first bytes pass in a burst.
    """
    sizes = sorted(seconds)
    slopes = [
        (seconds[large] - seconds[small]) / (large - small)
        for small, large in combinations(sizes[-_LARGEST:], 2)
    ]
    per_byte, fastest = median(slopes) if slopes else 0.0, min(seconds.values())
    if per_byte <= 0:
        return stage_costs.CollectiveRate(
            bytes_per_second=sizes[-1] / seconds[sizes[-1]], seconds=fastest
        )
    latency = max(0.0, fastest - sizes[0] * per_byte)
    return stage_costs.CollectiveRate(bytes_per_second=1 / per_byte, seconds=latency)


def _values(size: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    return torch.zeros(max(1, size // 4 // ranks) * ranks, device=device)


def _all_to_all(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_to_all_single(torch.empty_like(values), values, group=group, async_op=True)
    assert work is not None
    return work


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    return work

"""What one rank exchanges with another, inside a node and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from recd_plugin_tuning.cluster.collectives import fit_rate
from recd_plugin_tuning.cluster.groups import NodeGroups
from recd_plugin_tuning.cluster.timing import Effort, goes_on, rounds
from recd_plugins.api import CollectiveRate


@dataclass(frozen=True)
class Link:
    """One way from a node to another, or from a rank of a node to another of it.

    Attributes:
        source: node or rank that sends.
        target: that receives.
        rate: of one rank, while all ranks of the node use it too.
    """

    source: int
    target: int
    rate: CollectiveRate


def between_nodes(
    groups: NodeGroups, device: torch.device, effort: Effort, say: Callable[[str], None]
) -> list[Link]:
    """Links between nodes, all ranks of a node with those of their place in another. Collective.

    All nodes are at it at once, each of a pair one way; of many nodes some pairs.
    """
    found: list[Link] = []
    per_node = groups.ranks_per_node
    node, place = divmod(groups.rank, per_node)
    for shift in _shifts(groups.nodes, effort.partners):
        say(f"links between nodes {shift} apart")
        source, target = ((node + way) % groups.nodes for way in (-shift, shift))
        by_rank = _received(
            groups.rank, source * per_node + place, target * per_node + place, device, effort
        )
        for receiver in range(groups.nodes):
            ranks = by_rank[receiver * per_node : (receiver + 1) * per_node]
            found.append(Link((receiver - shift) % groups.nodes, receiver, _rate(ranks)))
    return found


def inside_nodes(
    groups: NodeGroups, device: torch.device, effort: Effort, say: Callable[[str], None]
) -> list[Link]:
    """Links between ranks of a node, of all nodes at once. Collective."""
    found: list[Link] = []
    per_node = groups.ranks_per_node
    first, place = groups.rank // per_node * per_node, groups.rank % per_node
    for shift in _shifts(per_node, effort.partners):
        say(f"links in a node between ranks {shift} apart")
        source, target = (first + (place + way) % per_node for way in (-shift, shift))
        by_rank = _received(groups.rank, source, target, device, effort)
        for rank, seconds in enumerate(by_rank):
            start = rank // per_node * per_node
            found.append(Link(start + (rank - start - shift) % per_node, rank, _rate([seconds])))
    return found


def _shifts(count: int, most: int) -> list[int]:
    """How far partners are apart: all distances, or some of many."""
    stride = max(1, (count - 1 + most - 1) // most)
    return list(range(1, count, stride))


def _received(
    rank: int, source: int, target: int, device: torch.device, effort: Effort
) -> Sequence[Mapping[int, float]]:
    """Median seconds by bytes in which each rank has received them."""
    if source != target:
        return _timed(source, target, device, effort)
    # Of two that exchange one sends at a time: both ways at once, one connection of gloo is no
    # faster than one after the other.
    found: list[Sequence[Mapping[int, float]]] = []
    for sends in (rank < target, rank > target):
        found.append(
            _timed(None, target, device, effort) if sends else _timed(source, None, device, effort)
        )
    return [each or other for each, other in zip(*found, strict=True)]


def _timed(
    source: int | None, target: int | None, device: torch.device, effort: Effort
) -> Sequence[Mapping[int, float]]:
    """By rank; of those that receive nothing there is nothing."""
    mine: dict[int, float] = {}
    last_size, last = 0, 0.0
    for size in effort.sizes:
        if last_size and not goes_on(size, last_size, last, effort):
            break
        sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))
        operations = []
        if target is not None:
            operations.append(dist.P2POp(dist.isend, sent, target))
        if source is not None:
            operations.append(dist.P2POp(dist.irecv, received, source))

        def exchange(operations: Sequence[dist.P2POp] = operations) -> None:
            for work in dist.batch_isend_irecv([*operations]):
                work.wait()

        if not last_size:
            exchange()  # connects the ranks
        own, slowest = rounds(exchange, device, effort)
        last_size, last = size, median(slowest)
        if source is not None:
            mine[size] = median(own)
    by_rank: list[dict[int, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return by_rank


def _rate(ranks: Sequence[Mapping[int, float]]) -> CollectiveRate:
    """Of the ranks of a node, which are done when the slowest is."""
    return fit_rate({size: max(seconds[size] for seconds in ranks) for size in ranks[0]})

"""One side on this rank: a sharded model, its pipeline, and batches that were made beforehand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugin_recd.benchmarks.network.link_trace import LinkTrace, trace_step
from recd_plugins.api.distributed import CollectiveBytes, resolve_group, stock_sharders
from recd_plugins.api.planning import TopologySpec
from recd_plugins.api.registry import load_registry
from recd_plugins.api.training import assemble
from recd_plugins.testing.benchmark import all_gradients_sent
from recd_plugins.testing.shaped_network import LinkBytes, link_bytes

# Of collectives that go round in a ring in gloo; others send to each rank.
_RING = ("all_reduce", "all_gather", "reduce_scatter")
# Gloo makes an all-reduce of a reduce-scatter.
_GLOO_TIMES = {"reduce_scatter": 2}
# What gloo sends besides, as it was counted on a link, with each message and in each round of a
# ring.
_MESSAGE_BYTES, _RING_BYTES = 154, 293


@dataclass(frozen=True)
class Sent:
    """Bytes of a step of a rank; those of its node's link are 0 but of ranks that count links.

    Attributes:
        payload: that it sends, by our own counter, whose conventions docs/measuring.md has.
        payload_between: of them, those to other nodes, as gloo sends them.
        messages: what gloo adds to these.
        link: by the counters of the interface, in the direction that has more.
        link_payload: that the node sends, likewise, without headers of packets.
    """

    payload: float
    payload_between: float
    messages: float
    link: float
    link_payload: float


class OneSide:
    """Trains one side step by step.

    Batches are read, converted and lowered at the start and go round: readers are another tier.
    Ranks take turns at those of one reader.

    Args:
        registry: of the side.
        stock: with TorchRec's own sharders.
        as_stock: with ours in place of what these lack, which send what they would.
        num_batches: how many go round.
        counts_links: whether this rank reads the counters of its node's link.
        topology: that is planned for.

    Attributes:
        predicted: its step, on rank 0, where costs of the topology are known.
    """

    def __init__(
        self,
        registry: Path,
        *,
        stock: bool,
        as_stock: bool,
        num_batches: int,
        counts_links: bool,
        topology: TopologySpec | None,
    ) -> None:
        read = load_registry(registry)
        device = torch.device("cpu")
        with all_gradients_sent() if as_stock else nullcontext():
            parts = assemble(
                read,
                "plugins",
                device,
                sharders=stock_sharders(read.training) if stock else None,
                topology=topology,
            )
        self.predicted = parts.predicted
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # Of the table's first rows, which plans look at: other rows have lists of other lengths.
        loader = parts.prepared.dataloader(rank=0, world_size=1, device=device)
        self.batches = list(islice(loader, rank, num_batches * world_size, world_size))
        self._around: Iterator[Any] = cycle(self.batches)
        self._pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
        self._losses: list[Tensor] = []
        self._counts_links = counts_links
        parts.dmp.train()

    def turn(self, steps: int) -> tuple[float, float]:
        """Train; wall seconds of a step, and processor seconds of this rank. A collective call."""
        self._steps(1)
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        self._steps(steps)
        dist.barrier()
        wall = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        processor = time.process_time() - processor
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        return float(wall) / steps, processor / steps

    def sent(self, ranks_per_node: int) -> Sent:
        """Bytes of a step, the mean of one round of all batches. A collective call."""
        self._steps(1)  # fills the pipeline: what it reads ahead is sent, too
        dist.barrier()
        before = self._link()
        dist.barrier()
        with CollectiveBytes() as counter:
            self._steps(len(self.batches))
        dist.barrier()
        link = self._link().since(before)
        messages = 0.0
        for traffic, calls in counter.calls.items():
            share = _share_between(traffic.kind, traffic.group, ranks_per_node)
            messages += share * calls * _gloo_bytes(traffic.kind, traffic.group)
        total, between = counter.total, bytes_between(counter, ranks_per_node)
        steps = len(self.batches)
        link_bytes = max(link.sent, link.received)
        return Sent(*(n / steps for n in (total, between, messages, link_bytes, link.payload)))

    def trace(self) -> LinkTrace:
        """One step of this rank on its node's link. A collective call."""
        self._steps(1)
        return trace_step(lambda: self._steps(1))

    def losses(self) -> list[float]:
        """By step of this rank."""
        return [float(loss) for loss in self._losses]

    def _steps(self, count: int) -> None:
        for _ in range(count):
            loss, _, _ = self._pipeline.progress(self._around)
            self._losses.append(loss.detach())

    def _link(self) -> LinkBytes:
        return link_bytes() if self._counts_links else LinkBytes(0, 0, 0)


def bytes_between(counter: CollectiveBytes, ranks_per_node: int) -> float:
    """What this rank sent to other nodes, as gloo sends it: of all-to-alls what each rank got."""
    node, between = dist.get_rank() // ranks_per_node, 0.0
    for traffic, num_bytes in counter.sent.items():
        if traffic.kind != "all_to_all":
            share = _share_between(traffic.kind, traffic.group, ranks_per_node)
            between += share * num_bytes * _GLOO_TIMES.get(traffic.kind, 1)
    for (group, place), num_bytes in counter.to_ranks.items():
        to = dist.get_process_group_ranks(resolve_group(group))[place]
        between += num_bytes * (to // ranks_per_node != node)
    return between


def _gloo_bytes(kind: str, group: str) -> int:
    """What gloo adds to one collective, of a rank."""
    others = len(dist.get_process_group_ranks(resolve_group(group))) - 1
    if kind not in _RING:
        return _MESSAGE_BYTES * others
    return _RING_BYTES * others * (1 if kind == "all_gather" else 2)


def _share_between(kind: str, group: str, ranks_per_node: int) -> float:
    """The share of the bytes that this rank sends in a group which leaves its node.

    Of what need not be even, the share of the messages.
    """
    ranks = dist.get_process_group_ranks(resolve_group(group))
    own, node = dist.get_rank(), dist.get_rank() // ranks_per_node
    if kind in _RING:
        following = ranks[(ranks.index(own) + 1) % len(ranks)]
        return float(following // ranks_per_node != node)
    others = [rank for rank in ranks if rank != own]
    if not others:
        return 0.0
    return sum(rank // ranks_per_node != node for rank in others) / len(others)

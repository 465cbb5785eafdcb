"""Measure the links and collectives of a cluster, and write them as a topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_tuning.rank_work import (
    Effort,
    MiddleHalf,
    WorkRates,
    alone_share,
    goes_on,
    measure_work,
    rounds,
    steps_in_a_row,
)
from recd_plugins.api import (
    COLLECTIVES,
    CollectiveRate,
    CollectiveRates,
    StageCosts,
    TopologySpec,
    new_group,
    ranks_of_each_node,
    this_machine,
)


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of a cluster, and this rank's process groups.

    Attributes:
        rank: this one.
        nodes: their number.
        ranks_per_node: likewise.
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
    """Make the process groups of nodes for the time of a context. Collective."""
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


#: The collectives of ``CollectiveRates`` in words.
NAMES = {
    "a2a_global": "all-to-all, all ranks",
    "a2a_intra": "all-to-all, in a node",
    "ar_global": "all-reduce, all ranks",
    "ar_cross": "all-reduce, across nodes",
}
# Sizes that the bandwidth is told by: of smaller ones latency and what links buffer decide.
_LARGEST = 3
# Rows and columns of matrix products beside a collective, and how many are timed alone.
_PRODUCT, _PRODUCTS = 256, 8

#: Seconds by bytes that a rank puts in, of each collective.
Sweeps = Mapping[str, Mapping[int, MiddleHalf]]
_Collective = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work]


def sweep(
    groups: NodeGroups, device: torch.device, effort: Effort, say: Callable[[str], None]
) -> dict[str, dict[int, MiddleHalf]]:
    """Seconds of each collective by size, until the slowest rank was done. Collective.

    All groups of a kind are at it at once, as in training.
    """
    kinds: dict[str, tuple[_Collective, dist.ProcessGroup]] = {
        "a2a_global": (_all_to_all, groups.everyone),
        "a2a_intra": (_all_to_all, groups.node),
        "ar_global": (_all_reduce, groups.everyone),
        "ar_cross": (_all_reduce, groups.across),
    }
    found = {}
    for name, (collective, group) in kinds.items():
        say(NAMES[name])
        found[name] = _by_size(device, collective, group, effort)
    return found


def _by_size(
    device: torch.device, collective: _Collective, group: dist.ProcessGroup, effort: Effort
) -> dict[int, MiddleHalf]:
    collective(_values(effort.sizes[0], group, device), group).wait()  # connects the ranks
    found: dict[int, MiddleHalf] = {}
    for size in effort.sizes:
        if found and not goes_on(size, (last := max(found)), found[last].median, effort):
            break
        values = _values(size, group, device)
        _, slowest = rounds(lambda values=values: collective(values, group).wait(), device, effort)  # type: ignore[misc]
        found[size] = MiddleHalf.of(slowest)
    return found


def hidden_share(groups: NodeGroups, device: torch.device, sweeps: Sweeps, effort: Effort) -> float:
    """Share of an all-reduce that is over when ranks have computed beside it for as long.

    0 where it is processors that it takes: ranks that share them compute slower then. Collective.
    """
    sizes = sweeps["ar_global"]
    short = [size for size, spread in sizes.items() if spread.median <= effort.seconds]
    size = max(short, default=min(sizes))
    values = _values(size, groups.everyone, device)
    matrix = torch.ones(_PRODUCT, _PRODUCT, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    def beside(times: int) -> None:
        work = _all_reduce(values, groups.everyone)
        compute(times)
        work.wait()

    def seconds(run: Callable[[], object]) -> float:
        _, slowest = rounds(run, device, effort)
        return MiddleHalf.of(slowest).low

    some = seconds(lambda: compute(_PRODUCTS))
    reduced = seconds(lambda: _all_reduce(values, groups.everyone).wait())
    times = max(1, round(_PRODUCTS * reduced / some))
    computed, both = seconds(lambda: compute(times)), seconds(lambda: beside(times))
    return min(1.0, max(0.0, (reduced + computed - both) / min(reduced, computed)))


def fit_rates(sweeps: Sweeps) -> CollectiveRates:
    """Latency and bandwidth of each, by the faster rounds.

    gloo's all-reduce polls: ranks that share cores take them from one another when they come at the
    same moment, as they do here and seldom in a step.
    """
    return CollectiveRates(
        **{
            name: fit_rate({size: spread.low for size, spread in sizes.items()})
            for name, sizes in sweeps.items()
        }
    )


def fit_rate(seconds: Mapping[int, float]) -> CollectiveRate:
    """Latency and bandwidth of what took so long by bytes.

    The bandwidth is the median slope between the largest sizes, since links that are limited let
    some bytes through at once; the latency is what the fastest size takes, which is a small one.
    """
    sizes = sorted(seconds)
    per_byte = _seconds_per_byte(seconds)
    if per_byte <= 0:
        # Larger ones take no longer: the bandwidth is at least what the largest reached.
        return CollectiveRate(
            bytes_per_second=sizes[-1] / seconds[sizes[-1]], seconds=min(seconds.values())
        )
    return CollectiveRate(
        bytes_per_second=1 / per_byte,
        seconds=max(0.0, min(seconds.values()) - sizes[0] * per_byte),
    )


def _seconds_per_byte(seconds: Mapping[int, float]) -> float:
    sizes = sorted(seconds)[-_LARGEST:]
    slopes = [
        (seconds[large] - seconds[small]) / (large - small)
        for small, large in combinations(sizes, 2)
    ]
    return median(slopes) if slopes else 0.0


def _values(size: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    return torch.zeros(max(1, size // 4 // ranks) * ranks, device=device)


def _all_to_all(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_to_all_single(torch.empty_like(values), values, group=group, async_op=True)
    assert work is not None, "asynchronous"
    return work


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None, "asynchronous"
    return work


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


_ROWS, _WIDTH = 8, 16


def dense_seconds(device: torch.device, effort: Effort) -> float:
    """A step of two layers under DistributedDataParallel, its all-reduce included. Collective.

    What Python, autograd, the wrapper and an optimizer do in each step, beside the few operators.
    """
    # None is drawn: a run whose start this is goes on with the generators as they are.
    layers = nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH, device="meta"), nn.ReLU(), nn.Linear(_WIDTH, 1, device="meta")
    ).to_empty(device=device)
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.01)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adagrad(layers.parameters(), lr=0.01)
    values = torch.ones(_ROWS, _WIDTH, device=device)
    labels = torch.ones(_ROWS, 1, device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(values), labels)
        torch.autograd.backward(loss)
        optimizer.step()

    for _ in range(2):  # DistributedDataParallel makes its buckets anew after the first
        step()
    return steps_in_a_row(step, device, effort)


# Tables, on as many ranks: others wait for these.
_TABLES = 4
_ROWS, _DIM = 64, 16


def module_seconds(device: torch.device, effort: Effort) -> float:
    """Return seconds of a step of TorchRec's own sharded module, an id a table. Collective.

    Beside what a collective takes alone: sizes that are sent first, and what Python does.
    """
    ranks = list(range(min(_TABLES, dist.get_world_size())))
    names = [f"t{number}" for number in range(len(ranks))]
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name,
                feature_names=[name],
                num_embeddings=_ROWS,
                embedding_dim=_DIM,
                # None is drawn: a run whose start this is goes on with the generators as they are.
                init_fn=torch.nn.init.zeros_,
            )
            for name in names
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    )
    plan = construct_module_sharding_plan(
        module,
        {
            name: table_wise(rank=rank, compute_kernel=EmbeddingComputeKernel.FUSED.value)
            for rank, name in zip(ranks, names, strict=True)
        },
        sharder,
        local_size=ranks_of_each_node(),
        world_size=dist.get_world_size(),
        device_type=device.type,
    )
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)
    ids = KeyedJaggedTensor.from_lengths_sync(
        names,
        torch.zeros(len(names), dtype=torch.int64, device=device),
        torch.ones(len(names), dtype=torch.int32, device=device),
    )

    def step() -> None:
        rows = sharded(ids)
        torch.autograd.backward(torch.cat([jagged.values() for jagged in rows.values()]).sum())

    step()
    return steps_in_a_row(step, device, effort)


@dataclass(frozen=True)
class MeasuredCluster:
    """What was measured, the same on every rank.

    Attributes:
        machine: the ranks, with defaults for what was not measured.
        inside: links between ranks of a node.
        between: links between nodes.
        sweeps: seconds of collectives by size.
        module: seconds of a step of a tiny sharded module.
        dense: seconds of a step of tiny dense layers, with its all-reduce.
        hidden: share of an all-reduce that compute beside it hides.
        alone: share of a rank's time that it takes while others wait.
        work: the work of ranks by themselves.
    """

    machine: TopologySpec
    inside: Sequence[Link]
    between: Sequence[Link]
    sweeps: Sweeps
    module: float
    dense: float
    hidden: float
    alone: float
    work: WorkRates

    @property
    def collective(self) -> float:
        """Seconds of each of the collectives that a sharded module has in a step."""
        return max(0.0, self.module - self.work.lookup["lookups"]) / COLLECTIVES

    @property
    def spec(self) -> TopologySpec:
        """The topology; of each figure the median."""
        machine, rates = self.machine, {name: s.median for name, s in self.work.rates.items()}
        changed: dict[str, Any] = {
            "ddr_bandwidth": rates["copy"],
            "flops": rates["matmul"],
        }
        if "device_copy" in rates:
            changed["hbm_bandwidth"] = rates["device_copy"]
            changed["hbm_to_ddr_bandwidth"] = rates["to_device"]
        for name, links in (("intra", self.inside), ("inter", self.between)):
            if links:
                bandwidth = median(link.rate.bytes_per_second for link in links)
                changed[f"{name}_node_bandwidth"] = bandwidth
        collectives = fit_rates(self.sweeps)
        if self.between:
            bounds = CollectiveRates.of_topology(machine.model_copy(update=changed))
            collectives = collectives.within(bounds)
        spec = machine.model_copy(update={**changed, "collectives": collectives})
        return spec.model_copy(update={"costs": self._costs(spec)})

    def _costs(self, spec: TopologySpec) -> StageCosts:
        """What the stages cost as far as it can be told without a model; else the least."""
        least, rates = spec.least_costs, spec.collective_rates
        across, in_node = least.all_to_all.bytes_across_nodes, least.all_to_all.bytes_in_node
        ranks, world = spec.ranks_per_node, spec.world_size
        # Rates are of all that a rank puts in, costs of what leaves it.
        if ranks > 1:
            in_node = ranks / (ranks - 1) / rates.a2a_intra.bytes_per_second
        if spec.nodes > 1:
            left = 1 / rates.a2a_global.bytes_per_second - in_node * (ranks - 1) / world
            across = max(across, left * world / (world - ranks))
        reduced = {}
        if world > 1:
            sent = 2 * (world - 1) / world
            reduced = {
                "steps": rates.ar_global.seconds,
                "bytes_reduced": 1 / rates.ar_global.bytes_per_second / sent,
            }
        work = {name: spread.median for name, spread in self.work.rates.items()}
        return StageCosts.model_validate(
            {
                "lookup": {
                    **self.work.lookup,
                    "bytes_from_host": least.lookup.bytes_from_host,
                    "bytes_from_file": least.lookup.bytes_from_file,
                },
                "gemm": self.work.gemm,
                "all_to_all": {
                    "collectives": self.collective,
                    "bytes_in_node": in_node,
                    "bytes_across_nodes": across,
                },
                "all_reduce": reduced,
                "hidden": self.hidden,
                "alone": self.alone,
                "other": {
                    "steps": max(0.0, self.dense - reduced.get("steps", 0.0)),
                    "element_bytes": 1 / work["elements"],
                    "operators": 1 / work["operators"],
                    "ids_made_unique": 1 / work["unique"],
                },
            }
        )

    def as_json(self) -> dict[str, Any]:
        """JSON values."""

        def links(each: Sequence[Link]) -> list[dict[str, Any]]:
            return [
                {"from": link.source, "to": link.target, **link.rate.model_dump()} for link in each
            ]

        return {
            "topology": self.spec.model_dump(exclude_none=True),
            "links_in_nodes": links(self.inside),
            "links_between_nodes": links(self.between),
            "collectives": {
                name: [{"bytes": size, **asdict(spread)} for size, spread in sizes.items()]
                for name, sizes in self.sweeps.items()
            },
            "hidden": self.hidden,
            "alone": self.alone,
            "collective": self.collective,
            "dense": self.dense,
            "work": {name: asdict(spread) for name, spread in self.work.rates.items()},
            "timed": [
                {"what": str(each), **asdict(each), **asdict(spread)}
                for each, spread in self.work.timed.items()
            ],
        }


def measure_cluster(
    device: torch.device, effort: Effort, say: Callable[[str], None]
) -> MeasuredCluster:
    """Measure the ranks of this process group. Collective.

    Args:
        device: of this rank.
        effort: how long.
        say: told on each rank what is measured next.
    """
    with node_groups() as groups:
        work = measure_work(device, effort, say)
        inside = inside_nodes(groups, device, effort, say)
        between = between_nodes(groups, device, effort, say)
        sweeps = sweep(groups, device, effort, say)
        one = groups.world_size == 1
        say("an all-reduce and matrix products at once")
        hidden = 0.0 if one else hidden_share(groups, device, sweeps, effort)
        say("the share of a processor that a rank has")
        alone = alone_share(device, effort)
        say("a sharded module")
        module = 0.0 if one else module_seconds(device, effort)
        say("a step of dense layers")
        dense = dense_seconds(device, effort)
        machine = this_machine(groups.ranks_per_node, nodes=groups.nodes, device=device)
    memory: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(memory, (machine.ddr_bytes, machine.hbm_bytes or 0))
    # What the node with the least has.
    least = {"ddr_bytes": min(host for host, _ in memory)}
    if machine.hbm_bytes:
        least["hbm_bytes"] = min(gpu for _, gpu in memory)
    found = machine.model_copy(update=least)
    return MeasuredCluster(found, inside, between, sweeps, module, dense, hidden, alone, work)

"""Measures collectives and local work of a cluster, and builds its topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_tuning.collectives import (
    NAMES,
    Sweeps,
    fit_rates,
    node_groups,
    sweep,
)
from recd_plugin_tuning.rank_work import (
    WORKS,
    Effort,
    WorkRates,
    measure_work,
    steps_in_a_row,
)
from recd_plugins.api import (
    rank_agreement,
    stage_costs,
    step_costs,
    text_table,
    text_utils,
    topologies,
)

# Number of tables, one per rank; rows per table; width of tables and dense layers.
_TABLES, _ROWS, _DIM = 4, 64, 16


def dense_seconds(device: torch.device, effort: Effort) -> float:
    """Return seconds per step of two small DistributedDataParallel layers. Collective call."""
    # Uses no global random state, so that a training run in this process is not affected.
    layers = nn.Sequential(
        nn.Linear(_DIM, _DIM, device="meta"), nn.ReLU(), nn.Linear(_DIM, 1, device="meta")
    ).to_empty(device=device)
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.01)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adagrad(layers.parameters(), lr=0.01)
    values, labels = (torch.ones(8, width, device=device) for width in (_DIM, 1))

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(values), labels)
        torch.autograd.backward(loss)
        optimizer.step()

    for _ in range(2):  # DDP rebuilds its buckets after the first
        step()
    return steps_in_a_row(step, device, effort)


def module_seconds(device: torch.device, effort: Effort) -> float:
    """Return seconds per step of a small sharded EmbeddingCollection. Collective call."""
    ranks = list(range(min(_TABLES, dist.get_world_size())))
    names = [f"t{number}" for number in range(len(ranks))]
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name,
                feature_names=[name],
                num_embeddings=_ROWS,
                embedding_dim=_DIM,
                init_fn=torch.nn.init.zeros_,  # draws no random numbers
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
        local_size=rank_agreement.ranks_of_each_node(),
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
    """Measurements of a cluster, equal on every rank. Times are in seconds.

    Attributes:
        machine: topology with assumed rates.
        sweeps: time of each collective, keyed by size in bytes.
        module: time of a step of a small sharded module.
        dense: time of a step of small dense layers, with its all-reduce.
        work: rates of local work.
    """

    machine: topologies.TopologySpec
    sweeps: Sweeps
    module: float
    dense: float
    work: WorkRates

    @property
    def collective(self) -> float:
        """Return the fixed time of a collective in a sharded module, in seconds."""
        return max(0.0, self.module - self.work.lookup["lookups"]) / step_costs.COLLECTIVES

    @property
    def spec(self) -> topologies.TopologySpec:
        """Return the topology of the cluster with the measured rates."""
        machine, rates = self.machine, self.work.rates
        changed: dict[str, Any] = {"ddr_bandwidth": rates["copy"], "flops": rates["matmul"]}
        if "device_copy" in rates:
            changed["hbm_bandwidth"] = rates["device_copy"]
            changed["hbm_to_ddr_bandwidth"] = rates["to_device"]
        collectives = fit_rates(self.sweeps)
        # Rates count all bytes of a rank; bandwidths count only the bytes that leave it.
        ranks, world = machine.ranks_per_node, machine.world_size
        in_node = 0.0
        if ranks > 1:
            in_node = ranks / (ranks - 1) / collectives.a2a_intra.bytes_per_second
            changed["intra_node_bandwidth"] = 1 / in_node
        if machine.nodes > 1:
            left = 1 / collectives.a2a_global.bytes_per_second - in_node * (ranks - 1) / world
            # Never faster than within a node.
            across = max(in_node, left * world / (world - ranks))
            changed["inter_node_bandwidth"] = 1 / across
        spec = machine.model_copy(update={**changed, "collectives": collectives})
        return spec.model_copy(update={"costs": self._costs(spec)})

    def _costs(self, spec: topologies.TopologySpec) -> stage_costs.StageCosts:
        """Return measured costs. Costs without a measurement keep their lower bounds."""
        least, rates, world = spec.least_costs, spec.collective_rates, spec.world_size
        reduced = {}
        if world > 1:
            per_byte = 1 / rates.ar_global.bytes_per_second / (2 * (world - 1) / world)
            reduced = {"steps": rates.ar_global.seconds, "bytes_reduced": per_byte}
        work = self.work.rates
        return stage_costs.StageCosts.model_validate(
            {
                "lookup": {
                    **self.work.lookup,
                    "bytes_from_host": least.lookup.bytes_from_host,
                    "bytes_from_file": least.lookup.bytes_from_file,
                },
                "gemm": self.work.gemm,
                "all_to_all": {
                    "collectives": self.collective,
                    "bytes_in_node": least.all_to_all.bytes_in_node,
                    "bytes_across_nodes": least.all_to_all.bytes_across_nodes,
                },
                "all_reduce": reduced,
                "other": {
                    "steps": max(0.0, self.dense - reduced.get("steps", 0.0)),
                    "element_bytes": 1 / work["elements"],
                    "operators": 1 / work["operators"],
                    "ids_made_unique": 1 / work["unique"],
                },
            }
        )

    def as_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values."""
        return {
            "topology": self.spec.model_dump(exclude_none=True),
            "collectives": {
                name: [{"bytes": size, "seconds": seconds} for size, seconds in sizes.items()]
                for name, sizes in self.sweeps.items()
            },
            "collective": self.collective,
            "dense": self.dense,
            "work": dict(self.work.rates),
            "timed": [
                {"what": str(each), **asdict(each), "seconds": seconds}
                for each, seconds in self.work.timed.items()
            ],
        }


def measure_cluster(
    device: torch.device, effort: Effort, say: Callable[[str], None]
) -> MeasuredCluster:
    """Measure the ranks of this process group. ``say`` is called with progress. Collective call."""
    with node_groups() as groups:
        work = measure_work(device, effort, say)
        sweeps = sweep(groups, device, effort, say)
        one = groups.world_size == 1
        say("a sharded module")
        module = 0.0 if one else module_seconds(device, effort)
        say("a step of dense layers")
        dense = dense_seconds(device, effort)
        machine = topologies.this_machine(groups.ranks_per_node, nodes=groups.nodes, device=device)
    memory: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(memory, (machine.ddr_bytes, machine.hbm_bytes or 0))
    # Use the smallest memory of all nodes.
    least = {"ddr_bytes": min(host for host, _ in memory)}
    if machine.hbm_bytes:
        least["hbm_bytes"] = min(gpu for _, gpu in memory)
    found = machine.model_copy(update=least)
    return MeasuredCluster(found, sweeps, module, dense, work)


_UNITS = {
    "matmul": ("GFLOP/s", 1e9),
    "unique": ("million ids/s", 1e6),
    "operators": ("thousand/s", 1e3),
}


def render(found: MeasuredCluster) -> RenderableType:
    """Return tables of the measured collectives and local work for a terminal."""
    return Group(_collectives(found), _work(found))


def _sending(found: MeasuredCluster) -> Iterator[tuple[str, stage_costs.CollectiveRate]]:
    """Yield the name and rate of each collective whose groups have more than one rank."""
    spec = found.machine
    sends = {"a2a_intra": spec.ranks_per_node > 1, "ar_cross": spec.nodes > 1}
    return (each for each in fit_rates(found.sweeps) if sends.get(each[0], spec.world_size > 1))


def _collectives(found: MeasuredCluster) -> Table:
    caption = (
        f"A collective of a sharded module takes at least {found.collective * 1e3:.2f} ms. A step "
        f"of small dense layers with all-reduce takes {found.dense * 1e3:.2f} ms."
    )
    numbers = ["latency, ms", "MB/s", "largest size", "its time, ms"]
    table = text_table("", ["collectives"], numbers, caption=caption)
    for name, rate in _sending(found):
        size, seconds = max(found.sweeps[name].items())
        table.add_row(
            NAMES[name],
            f"{rate.seconds * 1e3:.3f}",
            f"{rate.bytes_per_second / 1e6:,.1f}",
            text_utils.size_text(size),
            f"{seconds * 1e3:,.2f}",
        )
    return table


def _work(found: MeasuredCluster) -> Table:
    table = text_table("", ["local work per rank, with all ranks of the node busy"], [""])
    for name, rate in found.work.rates.items():
        unit, of_one = _UNITS.get(name, ("GB/s", 1e9))
        table.add_row(WORKS[name], f"{rate / of_one:,.2f} {unit}")
    for each, seconds in found.work.timed.items():
        table.add_row(str(each), f"{seconds * 1e3:,.2f} ms")
    return table

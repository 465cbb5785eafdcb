"""Measures collectives and local work of a cluster, and builds its topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
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
    hidden_share,
    node_groups,
    sweep,
)
from recd_plugin_tuning.rank_work import (
    WORKS,
    Effort,
    WorkRates,
    alone_share,
    measure_work,
    steps_in_a_row,
)
from recd_plugins.api import (
    file_utils,
    plots,
    rank_agreement,
    stage_costs,
    step_costs,
    text_table,
    text_utils,
    topologies,
)

# Tables, on as many ranks: others wait for these. Their rows and columns, those of layers, too.
_TABLES, _ROWS, _DIM = 4, 64, 16


def dense_seconds(device: torch.device, effort: Effort) -> float:
    """Time the fixed cost of a step of two layers under DistributedDataParallel. Collective."""
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
    """Time a step of TorchRec's sharded module with one id per table. Collective."""
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
    """Measurements of a cluster, equal on every rank.

    Attributes:
        machine: topology with assumed rates.
        sweeps: seconds of collectives by size.
        module: seconds of a step of a tiny sharded module.
        dense: seconds of a step of tiny dense layers, with its all-reduce.
        hidden: see ``hidden_share``.
        alone: see ``alone_share``.
        work: rates of local work.
    """

    machine: topologies.TopologySpec
    sweeps: Sweeps
    module: float
    dense: float
    hidden: float
    alone: float
    work: WorkRates

    @property
    def collective(self) -> float:
        """Return the seconds that a sharded module spends in each collective per step."""
        return max(0.0, self.module - self.work.lookup["lookups"]) / step_costs.COLLECTIVES

    @property
    def spec(self) -> topologies.TopologySpec:
        """Return the topology with median rates."""
        machine, rates = self.machine, {name: s.median for name, s in self.work.rates.items()}
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
        """Return measured costs; those without a measurement keep their lower bounds."""
        least, rates, world = spec.least_costs, spec.collective_rates, spec.world_size
        reduced = {}
        if world > 1:
            per_byte = 1 / rates.ar_global.bytes_per_second / (2 * (world - 1) / world)
            reduced = {"steps": rates.ar_global.seconds, "bytes_reduced": per_byte}
        work = {name: spread.median for name, spread in self.work.rates.items()}
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
        """Return JSON values."""
        return {
            "topology": self.spec.model_dump(exclude_none=True),
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
    """Measure the ranks of this process group; ``say`` shows progress. Collective."""
    with node_groups() as groups:
        work = measure_work(device, effort, say)
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
        machine = topologies.this_machine(groups.ranks_per_node, nodes=groups.nodes, device=device)
    memory: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(memory, (machine.ddr_bytes, machine.hbm_bytes or 0))
    # Use the smallest memory of all nodes.
    least = {"ddr_bytes": min(host for host, _ in memory)}
    if machine.hbm_bytes:
        least["hbm_bytes"] = min(gpu for _, gpu in memory)
    found = machine.model_copy(update=least)
    return MeasuredCluster(found, sweeps, module, dense, hidden, alone, work)


_FAR_APART = 2
_UNITS = {
    "matmul": ("GFLOP/s", 1e9),
    "unique": ("million ids/s", 1e6),
    "operators": ("thousand/s", 1e3),
}


def render(found: MeasuredCluster) -> RenderableType:
    """Return tables of collectives and local work with medians and quartiles."""
    return Group(_collectives(found), _work(found))


def far_apart(found: MeasuredCluster) -> str:
    """Return a warning if the quartiles of a measurement differ by a factor of 2, else nothing."""
    largest = {NAMES[name]: max(found.sweeps[name].items())[1] for name, _ in _sending(found)}
    works = {WORKS[name]: spread for name, spread in found.work.rates.items()}
    timed = {str(each): spread for each, spread in found.work.timed.items()}
    apart = [
        f"{name} {spread.high / spread.low:.1f}x"
        for name, spread in (largest | works | timed).items()
        if spread.high >= _FAR_APART * spread.low
    ]
    where = "as they do where ranks share cores, and where other programs run"
    return f"rounds lie far apart ({'; '.join(apart)}), {where}" if apart else ""


def _sending(found: MeasuredCluster) -> Iterator[tuple[str, stage_costs.CollectiveRate]]:
    """Return the collectives that send data: not those of a single rank or a single node."""
    spec = found.machine
    sends = {"a2a_intra": spec.ranks_per_node > 1, "ar_cross": spec.nodes > 1}
    return (each for each in fit_rates(found.sweeps) if sends.get(each[0], spec.world_size > 1))


def _collectives(found: MeasuredCluster) -> Table:
    caption = (
        f"beside products {found.hidden:.0%} of an all-reduce is hidden; while others wait a "
        f"rank takes {found.alone:.2f} of what it takes while all compute; each collective of "
        f"a sharded module takes {found.collective * 1e3:.2f} ms, however little it sends; a "
        f"step of small dense layers takes {found.dense * 1e3:.2f} ms with its all-reduce"
    )
    numbers = ["latency, ms", "MB/s", "largest", "took, ms", "middle half"]
    table = text_table("", ["collectives"], numbers, caption=caption)
    for name, rate in _sending(found):
        size, spread = max(found.sweeps[name].items())
        table.add_row(
            NAMES[name],
            f"{rate.seconds * 1e3:.3f}",
            f"{rate.bytes_per_second / 1e6:,.1f}",
            text_utils.size_text(size),
            f"{spread.median * 1e3:,.2f}",
            f"{spread.low * 1e3:,.2f} - {spread.high * 1e3:,.2f}",
        )
    return table


def _work(found: MeasuredCluster) -> Table:
    table = text_table("", ["a rank, while all of its node do the same"], ["", "middle half"])
    shown = [
        (WORKS[name], spread, *_UNITS.get(name, ("GB/s", 1e9)))
        for name, spread in found.work.rates.items()
    ]
    shown += [(str(each), spread, "ms", 1e-3) for each, spread in found.work.timed.items()]
    for words, spread, unit, of_one in shown:
        middle = f"{spread.low / of_one:,.2f} - {spread.high / of_one:,.2f}"
        table.add_row(words, f"{spread.median / of_one:,.2f} {unit}", middle)
    return table


@plots.plot_style()
def plot(found: MeasuredCluster, path: Path) -> None:
    """Plot the time of collectives over size, with the fitted lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, rate) in zip(plots.COLORS, _sending(found), strict=False):
        points = found.sweeps[name]
        of_bytes, spreads = list(points), list(points.values())
        middle = [spread.median * 1e3 for spread in spreads]
        errors = [
            [(spread.median - spread.low) * 1e3 for spread in spreads],
            [(spread.high - spread.median) * 1e3 for spread in spreads],
        ]
        fitted = [(rate.seconds + size / rate.bytes_per_second) * 1e3 for size in of_bytes]
        axes.errorbar(of_bytes, middle, yerr=errors, fmt="o", color=color, label=NAMES[name])
        axes.plot(of_bytes, fitted, color=color, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a rank", ylabel="ms")
    axes.set(title="Collectives; lines: latency and bandwidth")
    if found.machine.world_size > 1:
        axes.legend()
    spec = found.machine
    figure.suptitle(f"{spec.nodes} x {spec.ranks_per_node} ranks on {spec.device}")
    file_utils.write_figure(path, figure)

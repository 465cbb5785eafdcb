"""Topologies to plan for: built-in ones, this machine, and YAML files."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from recd_plugins.config.document import read_yaml
from recd_plugins.config.from_file import schema_problems
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces import step_cost
from recd_plugins.interfaces.step_cost import CollectiveRate, CollectiveRates
from recd_plugins.runtime.errors import RecdError, RegistryError, SetupError
from recd_plugins.runtime.text import did_you_mean

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner import Topology

#: Name of the topology of this machine.
MACHINE = "machine"
#: Assumed bandwidth for reading a file's rows in random order: 1 GiB/s, in bytes per second.
FILE_BYTES_PER_SECOND = float(2**30)
# Assumed bandwidths in bytes per second: gloo between processes; TorchRec's for host memory and
# GPUs.
_GLOO, _DDR = float(2**30), 51.0 * 2**30
_HBM, _PCI, _NVLINK, _NETWORK = 897.0 * 2**30, 32.0 * 2**30, 600.0 * 2**30, 12.5 * 2**30
# Float32 operations per second of a core with AVX2 at 2.5 GHz, and of an A100.
_CPU_FLOPS, _GPU_FLOPS = 80e9, 19.5e12

_Bytes = Annotated[StrictInt, Field(gt=0)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class TopologySpec(BaseModel):
    """A cluster: nodes, ranks per node, and memory and speed of each rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["cpu", "cuda"] = Field(
        description="Device that stores and looks up the tables."
    )
    ranks_per_node: Annotated[StrictInt, Field(gt=0)] = Field(
        description="Number of ranks per node. With device: cuda, each rank has one GPU."
    )
    nodes: Annotated[StrictInt, Field(gt=0)] = Field(default=1, description="Number of nodes.")
    hbm_bytes: _Bytes | None = Field(default=None, description="GPU memory per rank, in bytes.")
    ddr_bytes: _Bytes = Field(description="Host memory per rank, in bytes.")
    hbm_bandwidth: _Rate | None = Field(
        default=None, description="Bandwidth of GPU memory, in bytes per second."
    )
    ddr_bandwidth: _Rate = Field(
        description="Bandwidth of host memory per rank, in bytes per second."
    )
    hbm_to_ddr_bandwidth: _Rate | None = Field(
        default=None, description="Bandwidth between a GPU and host memory, in bytes per second."
    )
    intra_node_bandwidth: _Rate = Field(
        description="One-way bandwidth from a rank to ranks on its node, in bytes per second."
    )
    inter_node_bandwidth: _Rate = Field(
        description="One-way bandwidth from a rank to other nodes, in bytes per second."
    )
    flops: _Rate = Field(description="Dense float32 operations per second on each rank.")
    costs: step_cost.StageCosts | None = Field(
        default=None, description="Seconds per unit of work, for each stage of a step."
    )
    collectives: CollectiveRates | None = Field(
        default=None,
        description="Measured rates of collectives. Default: derived from the bandwidths.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device == "cuda":
            names = ("hbm_bytes", "hbm_bandwidth", "hbm_to_ddr_bandwidth")
            if missing := [name for name in names if getattr(self, name) is None]:
                raise ValueError(
                    f"device: cuda needs the keys {', '.join(map(repr, missing))}. Add these keys."
                )
        return self

    @property
    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def memory_bytes(self) -> int:
        """Return the memory per rank in bytes: GPU memory on CUDA, else host memory."""
        return self.hbm_bytes if self.device == "cuda" and self.hbm_bytes else self.ddr_bytes

    @property
    def collective_rates(self) -> CollectiveRates:
        """Return the measured rates (``collectives:``), or upper bounds from the bandwidths."""
        return self.collectives or self.link_rates

    @property
    def link_rates(self) -> CollectiveRates:
        """Return upper bounds of the collective rates: the busiest link's rate, without latency.

        For N nodes of W ranks, U = N x W in total, a rank sends (U - W) / U of an all-to-all
        through the network and (W - 1) / U within its node. An all-reduce of n ranks moves 2 (n -
        1) / n of the tensor. An all-reduce of all ranks first reduces within each node, then 1 / W
        of the tensor across nodes.
        """
        ranks, nodes, world = self.ranks_per_node, self.nodes, self.world_size

        def rate(in_node: float, across: float) -> CollectiveRate:
            intra = in_node / self.intra_node_bandwidth
            seconds = max(intra, across / self.inter_node_bandwidth)
            return CollectiveRate(bytes_per_second=1 / (seconds or 1 / self.intra_node_bandwidth))

        return CollectiveRates(
            a2a_global=rate((ranks - 1) / world, (world - ranks) / world),
            a2a_intra=rate((ranks - 1) / ranks, 0),
            ar_global=rate(2 * (ranks - 1) / ranks, 2 * (nodes - 1) / world),
            ar_cross=rate(0, 2 * (nodes - 1) / nodes or 1),
        )

    @property
    def least_costs(self) -> step_cost.StageCosts:
        """Return lower bounds of ``costs``, from bandwidths and operations per second."""
        memory = self.hbm_bandwidth or self.ddr_bandwidth
        to_host = self.hbm_to_ddr_bandwidth or self.ddr_bandwidth
        if self.device == "cpu":
            memory = to_host = self.ddr_bandwidth
        # Reduced bytes are those sent: 2 (U - 1) / U of a tensor.
        reduced = self.link_rates.ar_global.bytes_per_second
        reduced *= 2 * (self.world_size - 1) / self.world_size or 1.0
        return step_cost.StageCosts(
            lookup=step_cost.LookupCost(
                bytes_looked_up=3 / memory,  # read in forward, read and written in backward
                bytes_from_host=1 / to_host,
                bytes_from_file=1 / FILE_BYTES_PER_SECOND,
            ),
            gemm=step_cost.GemmCost(matmul_flops=1 / self.flops),
            all_to_all=step_cost.AllToAllCost(
                bytes_in_node=1 / self.intra_node_bandwidth,
                bytes_across_nodes=1 / self.inter_node_bandwidth,
            ),
            all_reduce=step_cost.AllReduceCost(bytes_reduced=1 / reduced),
            other=step_cost.OtherCost(element_bytes=1 / memory),
        )

    def to_torchrec(self) -> Topology:
        """Return TorchRec's topology for its planner; bandwidths are in bytes per millisecond."""
        # Imported here, since `recd validate` reads topologies without torchrec.
        from torchrec.distributed.planner.types import (
            BasicCommsBandwidths,
            HardwareConfig,
            KernelConfig,
            TopologyFactory,
            TrainerConfig,
        )

        def per_millisecond(rate: float | None) -> float | None:
            return None if rate is None else rate / 1000

        return TopologyFactory.create_topology(
            TrainerConfig(world_size=self.world_size, local_world_size=self.ranks_per_node),
            HardwareConfig(
                hbm_cap_bytes=self.hbm_bytes if self.device == "cuda" else None,
                ddr_cap_bytes=self.ddr_bytes,
                hbm_mem_bw=per_millisecond(self.hbm_bandwidth),
                ddr_mem_bw=self.ddr_bandwidth / 1000,
                hbm_to_ddr_mem_bw=per_millisecond(self.hbm_to_ddr_bandwidth),
            ),
            KernelConfig(
                compute_device=self.device,
                use_hardware_based_bandwidth=True,
                generalized_comms_bandwidths=BasicCommsBandwidths(
                    intra_host_bw=self.intra_node_bandwidth / 1000,
                    inter_host_bw=self.inter_node_bandwidth / 1000,
                ),
            ),
        )


def this_machine(ranks: int, *, nodes: int = 1, device: torch.device | None = None) -> TopologySpec:
    """Return a topology of machines like this one, with assumed bandwidths and operation rates."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_gpu: dict[str, Any] = {}
    if device is not None and device.type == "cuda":
        import torch

        on_gpu = {
            "device": "cuda",
            "hbm_bytes": torch.cuda.get_device_properties(device).total_memory,
            "hbm_bandwidth": _HBM,
            "hbm_to_ddr_bandwidth": _PCI,
            "intra_node_bandwidth": _NVLINK,
            "inter_node_bandwidth": _NETWORK,
            "flops": _GPU_FLOPS,
        }
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    on_cpu: dict[str, Any] = {
        "device": "cpu",
        "ranks_per_node": ranks,
        "nodes": nodes,
        "ddr_bytes": memory // ranks,
        "ddr_bandwidth": _DDR,
        "intra_node_bandwidth": _GLOO,
        "inter_node_bandwidth": _GLOO,
        "flops": cores * _CPU_FLOPS,
    }
    return TopologySpec.model_validate(on_cpu | on_gpu)


def topology_names() -> list[str]:
    """Return the names of the built-in topologies; the last name means this machine."""
    return [*sorted(_built_in()), MACHINE]


def load_topology(
    name: str,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    ranks: int = 1,
    device: str = "cpu",
) -> TopologySpec:
    """Return the built-in topology ``name``, or read a topology from a YAML file.

    ``name`` is one of ``topology_names``, or the path of a file (``*.yaml``, ``*.yml``). ``nodes``
    and ``ranks_per_node`` override its values. ``ranks`` and ``device`` are those of this machine.

    Raises:
        RegistryError: the file is invalid.
        RecdError: the topology does not exist, or its nodes have too few GPUs for the ranks.
    """
    if name == MACHINE:
        where = None
        if device != "cpu":
            import torch

            where = torch.device(device)
        return this_machine(ranks_per_node or ranks, nodes=nodes or 1, device=where)
    spec = read_topology(_path_of(name))
    if ranks_per_node is None:
        return spec if nodes is None else spec.model_copy(update={"nodes": nodes})
    if spec.device == "cuda" and ranks_per_node > spec.ranks_per_node:
        raise RecdError(
            f"a node of topology {name!r} has {spec.ranks_per_node} GPUs, too few for "
            f"{ranks_per_node} ranks. Use more nodes, or fewer ranks per node."
        )
    if spec.device == "cpu":
        # Ranks share memory and cores of a node; network bandwidths are per rank.
        scale = spec.ranks_per_node / ranks_per_node
        spec = spec.model_copy(
            update={
                "ddr_bytes": int(spec.ddr_bytes * scale),
                "ddr_bandwidth": spec.ddr_bandwidth * scale,
                "flops": spec.flops * scale,
            }
        )
    return spec.model_copy(update={"nodes": nodes or spec.nodes, "ranks_per_node": ranks_per_node})


def machine_of(
    training: TrainingSpec,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: torch.device | None = None,
) -> TopologySpec:
    """Return the topology of a run: ``training.topology``, or machines like this one.

    By default, ``world_size`` is the size of the process group, and ``local_world_size`` is
    ``LOCAL_WORLD_SIZE``, else all ranks. Without a process group, both are the run config's. The
    default device is the CPU.

    Raises:
        SetupError: the number of ranks is not a multiple of the ranks per node, or the device is
            not that of ``training.topology``.
        RecdError: the topology is unknown, invalid, or has too few GPUs per node.
    """
    import torch.distributed as dist

    if world_size is None:
        if dist.is_initialized():
            world_size = dist.get_world_size()
        else:
            world_size = training.ranks
            local_world_size = local_world_size or training.ranks_per_node
    local = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local = min(local, world_size)
    if world_size % local:
        raise SetupError(
            f"{world_size} ranks cannot be divided into nodes of {local} ranks. Use a number of "
            f"ranks that is a multiple of {local}."
        )
    nodes = world_size // local
    if training.topology in (None, MACHINE):
        return this_machine(local, nodes=nodes, device=device)
    spec = load_topology(str(training.topology), nodes=nodes, ranks_per_node=local)
    device_type = device.type if device else "cpu"
    if spec.device != device_type:
        raise SetupError(
            f"training.topology: {str(training.topology)!r} has ranks on {spec.device}, but this "
            f"run trains on {device_type}. Use another topology or null, or pass device= to wrap() "
            "or prepare()."
        )
    return spec


def default_topology(
    world_size: int, local_world_size: int | None = None, device: torch.device | None = None
) -> Topology:
    """Return TorchRec's Topology for machines like this one; on CUDA, each rank has a GPU."""
    return machine_of(TrainingSpec(), world_size, local_world_size, device).to_torchrec()


def costs_source(spec: TopologySpec) -> str:
    """Return text that says whether a topology's costs are measured or lower bounds."""
    if spec.costs is None:
        return "lower bounds from the bandwidths and operations per second of the topology"
    return "measured costs of the topology"


def read_topology(path: Path) -> TopologySpec:
    """Read a topology from a YAML file; raise RegistryError with line numbers if it is invalid."""
    document = read_yaml(path, first="`device:` and `ranks_per_node:`")
    try:
        return TopologySpec.model_validate(document.data)
    except ValidationError as error:
        problems = schema_problems(document, (), TopologySpec, "key of a topology", error)
        raise RegistryError(problems) from error


def is_file_name(name: str) -> bool:
    """Return True if ``name`` ends in .yaml or .yml."""
    return Path(name).suffix in (".yaml", ".yml")


def _path_of(name: str) -> Path:
    built_in = _built_in()
    if name in built_in:
        return built_in[name]
    if is_file_name(name):
        return Path(name)
    known = topology_names()
    raise RecdError(
        f"no topology is named {name!r}"
        + (did_you_mean(name, known) or f". Known topologies: {', '.join(map(repr, known))}.")
        + " The path of a topology file must end in .yaml."
    )


def _built_in() -> dict[str, Path]:
    folder = Path(str(files("recd_plugins.planning") / "topologies"))
    return {path.stem: path for path in folder.glob("*.yaml")}

"""Clusters to plan for: built-in ones, this machine, and those of YAML files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    create_model,
    model_validator,
)

from recd_plugins.config.document import read_yaml
from recd_plugins.config.from_file import schema_problems
from recd_plugins.config.manager import PluginManager
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces import step_cost
from recd_plugins.interfaces.step_cost import CollectiveRate, CollectiveRates
from recd_plugins.runtime.errors import RecdError, RegistryError, SetupError
from recd_plugins.runtime.text import did_you_mean

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner import Topology

#: The name of the topology that is the machine at hand.
MACHINE = "machine"

#: Bytes a second of a file whose rows are read in random order: an assumption, 1 GiB/s.
FILE_BYTES_PER_SECOND = float(2**30)
# Bytes a second between processes over gloo: an assumption, 1 GiB/s. TorchRec's default is that of
# NVLink, 600 GiB/s, with which communication would count for nothing.
_GLOO = float(2**30)
# TorchRec's own default for the memory of a host, 51 GiB/s.
_DDR = 51.0 * 2**30
# TorchRec's own defaults for a GPU: 897, 32, 600 and 12.5 GiB/s.
_HBM, _PCI, _NVLINK, _NETWORK = 897.0 * 2**30, 32.0 * 2**30, 600.0 * 2**30, 12.5 * 2**30
# A core that multiplies float32 with AVX2 at 2.5 GHz; a GPU of the size of an A100.
_CPU_FLOPS, _GPU_FLOPS = 80e9, 19.5e12

_Bytes = Annotated[StrictInt, Field(gt=0)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class TopologySpec(BaseModel):
    """Nodes with ranks: what each rank has, and how fast it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["cpu", "cuda"] = Field(description="Where tables live and are looked up.")
    ranks_per_node: Annotated[StrictInt, Field(gt=0)] = Field(
        description="Ranks of a node, one a GPU where device is cuda."
    )
    nodes: Annotated[StrictInt, Field(gt=0)] = Field(default=1, description="Nodes.")
    hbm_bytes: _Bytes | None = Field(default=None, description="Memory of a rank's GPU.")
    ddr_bytes: _Bytes = Field(description="A rank's share of the memory of its node.")
    hbm_bandwidth: _Rate | None = Field(default=None, description="Of that GPU, bytes a second.")
    ddr_bandwidth: _Rate = Field(description="A rank's share of its node's, bytes a second.")
    hbm_to_ddr_bandwidth: _Rate | None = Field(
        default=None, description="Between a GPU and its node's memory, bytes a second."
    )
    intra_node_bandwidth: _Rate = Field(
        description="Of one rank to others of its node, one way, bytes a second."
    )
    inter_node_bandwidth: _Rate = Field(
        description="Of one rank to other nodes, one way, bytes a second."
    )
    flops: _Rate = Field(description="Dense float32 operations of a rank a second.")
    costs: step_cost.StageCosts | None = Field(
        default=None, description="What the stages of a step cost, as recd plan --calibrate wrote."
    )
    collectives: CollectiveRates | None = Field(
        default=None, description="What collectives reach; else what the bandwidths allow."
    )

    @model_validator(mode="after")
    def _gpu_has_memory(self) -> Self:
        if self.device == "cuda":
            missing = [
                name
                for name in ("hbm_bytes", "hbm_bandwidth", "hbm_to_ddr_bandwidth")
                if getattr(self, name) is None
            ]
            if missing:
                raise ValueError(f"device cuda needs {', '.join(missing)}")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is TopologySpec:
            return super().__reduce_ex__(protocol)
        return topology_of, (self.model_dump(),)  # with sections it is of a class without a module

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank's memory, where tables live."""
        return self.hbm_bytes if self.device == "cuda" and self.hbm_bytes else self.ddr_bytes

    @property
    def collective_rates(self) -> CollectiveRates:
        """The rates of the section ``collectives``, or what the bandwidths allow."""
        return self.collectives or CollectiveRates.of_topology(self)

    @property
    def least_costs(self) -> step_cost.StageCosts:
        """Lower bounds of ``costs``: nothing but bandwidths and operations a second.

        A lookup reads an embedding, and the backward pass reads and writes it again. Nothing hides
        what cached tables move, as lookahead may.
        """
        on_device = self.device == "cuda" and self.hbm_bandwidth is not None
        memory = self.hbm_bandwidth if on_device else self.ddr_bandwidth
        to_host = self.hbm_to_ddr_bandwidth if on_device else self.ddr_bandwidth
        assert memory is not None, "checked when it was made"
        assert to_host is not None, "checked when it was made"
        # Of a tensor that is reduced each rank sends 2 (U - 1) / U: what counts as reduced.
        reduced = CollectiveRates.of_topology(self).ar_global.bytes_per_second
        reduced *= 2 * (self.world_size - 1) / self.world_size or 1.0
        return step_cost.StageCosts(
            lookup=step_cost.LookupCost(
                bytes_looked_up=3 / memory,
                bytes_from_host=1 / to_host,
                bytes_from_file=1 / FILE_BYTES_PER_SECOND,
            ),
            gemm=step_cost.GemmCost(matmul_flops=1 / self.flops, attention_flops=1 / self.flops),
            all_to_all=step_cost.AllToAllCost(
                bytes_in_node=1 / self.intra_node_bandwidth,
                bytes_across_nodes=1 / self.inter_node_bandwidth,
            ),
            all_reduce=step_cost.AllReduceCost(bytes_reduced=1 / reduced),
            other=step_cost.OtherCost(element_bytes=1 / memory),
        )

    @property
    def sections(self) -> dict[str, BaseModel]:
        """What packages of plugins know of these machines, by the name of the section."""
        names = type(self).model_fields.keys() - TopologySpec.model_fields.keys()
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    def with_section(self, name: str, section: BaseModel) -> TopologySpec:
        """The same with what a package of plugins has measured."""
        return _model().model_validate({**dict(self), name: section})

    def to_torchrec(self) -> Topology:
        """Return the topology for TorchRec's planner. Its bandwidths are bytes a millisecond."""
        # `recd validate` reads topologies without the seconds that these imports take.
        from torchrec.distributed.planner.types import (
            BasicCommsBandwidths,
            HardwareConfig,
            KernelConfig,
            TopologyFactory,
            TrainerConfig,
        )

        return TopologyFactory.create_topology(
            TrainerConfig(world_size=self.world_size, local_world_size=self.ranks_per_node),
            HardwareConfig(
                hbm_cap_bytes=self.hbm_bytes if self.device == "cuda" else None,
                ddr_cap_bytes=self.ddr_bytes,
                hbm_mem_bw=None if self.hbm_bandwidth is None else self.hbm_bandwidth / 1000,
                ddr_mem_bw=self.ddr_bandwidth / 1000,
                hbm_to_ddr_mem_bw=(
                    None if self.hbm_to_ddr_bandwidth is None else self.hbm_to_ddr_bandwidth / 1000
                ),
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
    """Return machines like this one, with assumed bandwidths and operations a second."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device is None or device.type == "cpu":
        cores = max(1, len(os.sched_getaffinity(0)) // ranks)
        return TopologySpec(
            device="cpu",
            ranks_per_node=ranks,
            nodes=nodes,
            ddr_bytes=memory // ranks,
            ddr_bandwidth=_DDR,
            intra_node_bandwidth=_GLOO,
            inter_node_bandwidth=_GLOO,
            flops=cores * _CPU_FLOPS,
        )
    import torch

    return TopologySpec(
        device="cuda",
        ranks_per_node=ranks,
        nodes=nodes,
        hbm_bytes=torch.cuda.get_device_properties(device).total_memory,
        ddr_bytes=memory // ranks,
        hbm_bandwidth=_HBM,
        ddr_bandwidth=_DDR,
        hbm_to_ddr_bandwidth=_PCI,
        intra_node_bandwidth=_NVLINK,
        inter_node_bandwidth=_NETWORK,
        flops=_GPU_FLOPS,
    )


def topology_names() -> list[str]:
    """The built-in topologies, this machine last."""
    return [*sorted(_built_in()), MACHINE]


def load_topology(
    name: str,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    ranks: int = 1,
    device: str = "cpu",
) -> TopologySpec:
    """Return a topology by its name, or of a YAML file.

    Args:
        name: one of ``topology_names``, or the path of a file (``*.yaml``, ``*.yml``).
        nodes: in place of the topology's own.
        ranks_per_node: likewise; no more than a node has GPUs.
        ranks: of this machine, unless ``ranks_per_node`` is given.
        device: of this machine, ``cpu`` or ``cuda``.

    Raises:
        RegistryError: the file is wrong.
        RecdError: there is no such topology, or its nodes have no room for the ranks.
    """
    if name == MACHINE:
        where = None
        if device != "cpu":
            import torch

            where = torch.device(device)
        return this_machine(ranks_per_node or ranks, nodes=nodes or 1, device=where)
    spec = read_topology(_path_of(name))
    if (
        ranks_per_node is not None
        and spec.device == "cuda"
        and ranks_per_node > spec.ranks_per_node
    ):
        raise RecdError(
            f"a node of {name} has {spec.ranks_per_node} GPUs, which is no room for "
            f"{ranks_per_node} ranks; take more nodes"
        )
    if ranks_per_node is not None and spec.device == "cpu":
        # The ranks share what a node has, but for the bandwidth of the network of one.
        scale = spec.ranks_per_node / ranks_per_node
        spec = spec.model_copy(
            update={
                "ddr_bytes": int(spec.ddr_bytes * scale),
                "ddr_bandwidth": spec.ddr_bandwidth * scale,
                "flops": spec.flops * scale,
            }
        )
    changed = {"nodes": nodes, "ranks_per_node": ranks_per_node}
    return spec.model_copy(update={key: n for key, n in changed.items() if n is not None})


def machine_of(
    training: TrainingSpec,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: torch.device | None = None,
) -> TopologySpec:
    """Return the ranks that a registry is trained on from here.

    They are those of ``training.topology``; if it names none, machines like this one.

    Args:
        training: its ranks count if there is no process group.
        world_size: ranks; those of the process group, else of the registry, without it.
        local_world_size: ranks a node; ``LOCAL_WORLD_SIZE``, else all ranks, without it.
        device: of the tables; CPU without it.

    Raises:
        SetupError: the ranks do not fill nodes, or are not those of ``training.topology``.
        RecdError: the topology is unknown or its file is wrong.
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
            f"{world_size} ranks do not fill nodes of {local} each; every node needs as many"
        )
    nodes = world_size // local
    if training.topology in (None, MACHINE):
        return this_machine(local, nodes=nodes, device=device)
    return named_topology(str(training.topology), nodes, local, device.type if device else "cpu")


def default_topology(
    world_size: int, local_world_size: int | None = None, device: torch.device | None = None
) -> Topology:
    """Return ranks on machines like this one, which share its memory, each with a GPU on CUDA."""
    return machine_of(TrainingSpec(), world_size, local_world_size, device).to_torchrec()


def named_topology(name: str, nodes: int, ranks_per_node: int, device: str) -> TopologySpec:
    """Return the topology of a name or file, adapted to a number of nodes.

    On other numbers of nodes, measured collectives scale as the bounds of the links do.

    Raises:
        RegistryError: the file is wrong.
        SetupError: it is of another device, or was measured on nodes that say nothing of these.
    """
    spec = load_topology(name)
    if spec.device != device:
        raise SetupError(
            f"training.topology: {name} is of ranks on {spec.device}, and this run trains on "
            f"{device}; name a topology of such ranks, or leave it out (null); a trainer that "
            "calls wrap or prepare says by device= where it trains"
        )
    if (spec.nodes, spec.ranks_per_node) == (nodes, ranks_per_node):
        return spec
    if _is_measured(spec) and (why := _says_nothing_of(spec, nodes, ranks_per_node)):
        raise SetupError(
            f"training.topology: {name} was measured on {_shape(spec.nodes, spec.ranks_per_node)}, "
            f"and this run has {_shape(nodes, ranks_per_node)}, {why}: measure these with "
            "`recd calibrate`, started as this run is, or set training.topology to null"
        )
    adapted = load_topology(name, nodes=nodes, ranks_per_node=ranks_per_node)
    if spec.collectives is None:
        return adapted
    before, after = CollectiveRates.of_topology(spec), CollectiveRates.of_topology(adapted)
    rates = {
        key: CollectiveRate(
            bytes_per_second=rate.bytes_per_second
            * getattr(after, key).bytes_per_second
            / getattr(before, key).bytes_per_second,
            seconds=rate.seconds,
        )
        for key, rate in spec.collectives
    }
    return adapted.model_copy(update={"collectives": CollectiveRates(**rates)})


def costs_source(spec: TopologySpec) -> str:
    """Return where the costs of a topology come from, in words."""
    if spec.costs is None:
        return "bandwidths and operations a second of the topology: what none can be faster than"
    return "measured, of the topology"


def _is_measured(spec: TopologySpec) -> bool:
    return spec.costs is not None or spec.collectives is not None


def _says_nothing_of(measured: TopologySpec, nodes: int, ranks_per_node: int) -> str:
    """Why a run on other nodes cannot be told by those that were measured; empty if it can."""
    if measured.ranks_per_node != ranks_per_node:
        return "which share their cores and their network otherwise"
    return "of whose network it says nothing" if measured.nodes == 1 < nodes else ""


def _shape(nodes: int, ranks_per_node: int) -> str:
    ranks = "1 rank" if ranks_per_node == 1 else f"{ranks_per_node} ranks"
    return f"one node of {ranks}" if nodes == 1 else f"{nodes} nodes of {ranks} each"


def read_topology(path: Path) -> TopologySpec:
    """The topology of a YAML file.

    Raises:
        RegistryError: what is wrong with it, with lines.
    """
    document = read_yaml(path, first="`device:` and `ranks_per_node:`")
    model = _model()
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems = schema_problems(document, (), model, "key of a topology", error)
        raise RegistryError(problems) from error


def topology_of(values: Mapping[str, Any]) -> TopologySpec:
    """A topology of what its ``model_dump`` gave, with the sections of the installed plugins."""
    return _model().model_validate(values)


def _model() -> type[TopologySpec]:
    """The schema of a topology file, with the sections of the installed plugins."""
    return _with_fields(tuple(PluginManager().register_topology_sections().items()))


@cache
def _with_fields(sections: tuple[tuple[str, type[BaseModel]], ...]) -> type[TopologySpec]:
    fields: Any = {name: (cls | None, None) for name, cls in sections}
    return create_model("TopologySpec", __base__=TopologySpec, **fields)


def is_file_name(name: str) -> bool:
    """Whether a topology of this name, which is no built-in one, is a file."""
    return Path(name).suffix in (".yaml", ".yml")


def _path_of(name: str) -> Path:
    built_in = _built_in()
    if name in built_in:
        return built_in[name]
    if is_file_name(name):
        return Path(name)
    known = topology_names()
    raise RecdError(
        f"no topology is named {name}"
        + (did_you_mean(name, known) or f"; there are {', '.join(known)}")
        + " (the file of another ends in .yaml)"
    )


def _built_in() -> dict[str, Path]:
    folder = Path(str(files("recd_plugins.planning") / "topologies"))
    return {path.stem: path for path in folder.glob("*.yaml")}

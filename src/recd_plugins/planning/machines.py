"""The ranks that run: those of ``training.topology``, or on machines like this one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology

from recd_plugins.errors import SetupError
from recd_plugins.planning.topologies import MACHINE, TopologySpec, load_topology, this_machine
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.values.collective_rates import CollectiveRate, CollectiveRates


def machine_of(
    training: TrainingSpec,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: torch.device | None = None,
) -> TopologySpec:
    """The ranks that a registry is trained on from here.

    They are those of ``training.topology``; where that names none, on machines like this one.

    Args:
        training: says how many ranks, where there is no process group.
        world_size: ranks; those of the process group, else of the registry, without it.
        local_world_size: ranks a node; ``LOCAL_WORLD_SIZE``, else all ranks, without it; the
            registry's where its ``world_size`` counts.
        device: of the tables; CPU without it.

    Raises:
        SetupError: the ranks do not fill nodes, or are not those of ``training.topology``.
        RecdError: there is no such topology, or its file is wrong, or it is of too many ranks.
    """
    if world_size is None:
        if dist.is_initialized():
            world_size = dist.get_world_size()
        else:
            world_size = training.ranks
            local_world_size = local_world_size or training.ranks_per_node
    if training.topology in (None, MACHINE):
        return _machine(world_size, local_world_size, device)
    nodes, local = _nodes(world_size, local_world_size)
    return named_topology(str(training.topology), nodes, local, device.type if device else "cpu")


def default_topology(
    world_size: int, local_world_size: int | None = None, device: torch.device | None = None
) -> Topology:
    """Ranks on machines like this one, which share its memory, each with a GPU on CUDA."""
    return _machine(world_size, local_world_size, device).to_torchrec()


def _machine(
    world_size: int, local_world_size: int | None, device: torch.device | None
) -> TopologySpec:
    nodes, local = _nodes(world_size, local_world_size)
    return this_machine(local, nodes=nodes, device=device)


def _nodes(world_size: int, local_world_size: int | None) -> tuple[int, int]:
    """Nodes, and the ranks of each."""
    local = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local = min(local, world_size)
    if world_size % local:
        raise SetupError(
            f"{world_size} ranks do not fill nodes of {local} each; every node needs as many"
        )
    return world_size // local, local


def named_topology(name: str, nodes: int, ranks_per_node: int, device: str) -> TopologySpec:
    """The topology of that name or file, of so many nodes.

    What was measured of ranks holds for as many in a node; of other numbers of nodes the
    collectives are taken to lose or gain as the bounds of the links do.

    Args:
        name: as ``load_topology`` takes it.
        nodes: that run.
        ranks_per_node: of them.
        device: where tables are trained: ``cpu`` or ``cuda``.

    Raises:
        RegistryError: the file is wrong; says the line.
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
    return _of_nodes(load_topology(name, nodes=nodes, ranks_per_node=ranks_per_node), spec)


def adapted_line(name: str | None, spec: TopologySpec) -> str:
    """What a topology that was measured on other nodes is taken to say of these, in a line.

    Args:
        name: as ``load_topology`` takes it; None names none.
        spec: it, perhaps of other numbers of nodes and ranks.

    Returns:
        Nothing where it was measured on as many, or not at all.
    """
    if name in (None, MACHINE):
        return ""
    measured = load_topology(str(name))
    here = spec.nodes, spec.ranks_per_node
    if not _is_measured(measured) or (measured.nodes, measured.ranks_per_node) == here:
        return ""
    taken = "what it has of ranks is taken to hold for them"
    if spec.collectives != measured.collectives:
        taken += ", and collectives to take longer or less as the links between nodes allow"
    if why := _says_nothing_of(measured, *here):
        taken += f"; recd run refuses it for these, {why}"
    return (
        f"{name} was measured on {_shape(measured.nodes, measured.ranks_per_node)}, and here are "
        f"{_shape(*here)}: {taken}"
    )


def costs_source(name: str, spec: TopologySpec) -> str:
    """Where the costs of a topology come from, in words.

    Args:
        name: as ``load_topology`` takes it.
        spec: it, perhaps of other numbers of nodes and ranks.
    """
    if spec.costs is None:
        return "bandwidths and operations a second of the topology: what none can be faster than"
    # Of the machine at hand they were measured just now.
    measured = spec if name == MACHINE else load_topology(name)
    if (measured.nodes, measured.ranks_per_node) == (spec.nodes, spec.ranks_per_node):
        return "measured, of the topology"
    network = ", whose network is assumed" if measured.nodes == 1 < spec.nodes else ""
    return (
        f"measured on {_shape(measured.nodes, measured.ranks_per_node)}, and taken to hold for "
        f"{_shape(spec.nodes, spec.ranks_per_node)}{network}"
    )


def _of_nodes(spec: TopologySpec, measured: TopologySpec) -> TopologySpec:
    """``spec`` with the collectives of other numbers of its nodes, as they were measured."""
    if measured.collectives is None:
        return spec
    before, after = CollectiveRates.of_topology(measured), CollectiveRates.of_topology(spec)
    rates = {
        name: CollectiveRate(
            bytes_per_second=rate.bytes_per_second
            * getattr(after, name).bytes_per_second
            / getattr(before, name).bytes_per_second,
            seconds=rate.seconds,
        )
        for name, rate in measured.collectives
    }
    return spec.model_copy(update={"collectives": CollectiveRates(**rates)})


def _is_measured(spec: TopologySpec) -> bool:
    return spec.costs is not None or spec.collectives is not None


def _says_nothing_of(measured: TopologySpec, nodes: int, ranks_per_node: int) -> str:
    """Why a run on other nodes cannot be told by those that were measured; empty where it can."""
    if measured.ranks_per_node != ranks_per_node:
        return "which share their cores and their network otherwise"
    return "of whose network it says nothing" if measured.nodes == 1 < nodes else ""


def _shape(nodes: int, ranks_per_node: int) -> str:
    ranks = "1 rank" if ranks_per_node == 1 else f"{ranks_per_node} ranks"
    return f"one node of {ranks}" if nodes == 1 else f"{nodes} nodes of {ranks} each"

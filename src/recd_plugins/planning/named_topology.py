"""The cluster that ``training.topology`` names, for the ranks that run."""

from __future__ import annotations

from recd_plugins.errors import SetupError
from recd_plugins.planning.topologies import TopologySpec, load_topology
from recd_plugins.values.collective_rates import CollectiveRate, CollectiveRates


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
            f"{device}; name a topology of such ranks, or leave it out (null)"
        )
    if (spec.nodes, spec.ranks_per_node) == (nodes, ranks_per_node):
        return spec
    if spec.costs is None and spec.collectives is None:
        return load_topology(name, nodes=nodes, ranks_per_node=ranks_per_node)
    if spec.ranks_per_node != ranks_per_node or spec.nodes == 1:
        why = "which share their cores and their network otherwise"
        if spec.ranks_per_node == ranks_per_node:
            why = "of whose network it says nothing"
        raise SetupError(
            f"training.topology: {name} was measured on {_shape(spec.nodes, spec.ranks_per_node)}, "
            f"and this run has {_shape(nodes, ranks_per_node)}, {why}: measure these with "
            "`recd calibrate`, started as this run is, or set training.topology to null"
        )
    return _of_other_nodes(spec, nodes)


def _of_other_nodes(spec: TopologySpec, nodes: int) -> TopologySpec:
    """``spec`` with so many of its nodes."""
    moved = spec.model_copy(update={"nodes": nodes})
    if spec.collectives is None:
        return moved
    before, after = CollectiveRates.of_topology(spec), CollectiveRates.of_topology(moved)
    rates = {
        name: CollectiveRate(
            bytes_per_second=rate.bytes_per_second
            * getattr(after, name).bytes_per_second
            / getattr(before, name).bytes_per_second,
            seconds=rate.seconds,
        )
        for name, rate in spec.collectives
    }
    return moved.model_copy(update={"collectives": CollectiveRates(**rates)})


def _shape(nodes: int, ranks_per_node: int) -> str:
    ranks = "1 rank" if ranks_per_node == 1 else f"{ranks_per_node} ranks"
    return f"one node of {ranks}" if nodes == 1 else f"{nodes} nodes of {ranks} each"

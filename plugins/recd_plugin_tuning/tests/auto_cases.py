"""A registry's only entry, the machines that it is planned for, and what it chose."""

from __future__ import annotations

from typing import Any

from recd_plugin_tuning.auto import Chosen
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.step_cost import Compute, Operations
from recd_plugins.planning.topologies import TopologySpec, load_topology

AUTO = [{"use": "auto"}]
NO_COMPUTE = Compute(Operations(), Operations(), 0)


def slow(nodes: int = 2, **changed: Any) -> TopologySpec:
    """Nodes of two ranks behind a link of 100 Mbit/s."""
    spec = load_topology("machine", nodes=nodes, ranks=2)
    return spec.model_copy(update={"inter_node_bandwidth": 6.25e6, "flops": 2e10, **changed})


def chosen_of(prepared: Prepared) -> Chosen:
    assert isinstance(prepared.chosen, Chosen)
    return prepared.chosen

"""A cluster as its ranks find it, and the topology that says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from recd_plugin_tuning.cluster.collectives import (
    Sweeps,
    fit_rates,
    hidden_share,
    sweep,
)
from recd_plugin_tuning.cluster.dense_layers import dense_seconds
from recd_plugin_tuning.cluster.groups import node_groups
from recd_plugin_tuning.cluster.links import Link, between_nodes, inside_nodes
from recd_plugin_tuning.cluster.sharded_module import module_seconds
from recd_plugin_tuning.cluster.timing import Effort
from recd_plugin_tuning.cluster.work_rates import WorkRates, alone_share, measure_work
from recd_plugins.api import (
    COLLECTIVES,
    CollectiveRates,
    SetupError,
    StageCosts,
    TopologySpec,
    this_machine,
)


@dataclass(frozen=True)
class MeasuredCluster:
    """What was measured, the same on every rank.

    Attributes:
        machine: the ranks with what was not measured: memory, and links that are not there.
        inside: links between ranks of a node.
        between: links between nodes.
        sweeps: seconds of collectives by size.
        module: seconds of a step of a sharded module, however little it looks up.
        dense: seconds of a step of dense layers, however small, with its all-reduce.
        hidden: share of an all-reduce that is over when ranks have computed beside it.
        alone: of what a rank takes while all compute, the share that it takes while others wait.
        work: what ranks do by themselves.
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

    Raises:
        SetupError: nodes have different numbers of ranks, or another rank has ended.
    """
    told: list[str] = []

    def tell(what: str) -> None:
        told.append(what)
        say(what)

    try:
        with node_groups() as groups:
            work = measure_work(device, effort, tell)
            inside = inside_nodes(groups, device, effort, tell)
            between = between_nodes(groups, device, effort, tell)
            sweeps = sweep(groups, device, effort, tell)
            one = groups.world_size == 1
            tell("an all-reduce and matrix products at once")
            hidden = 0.0 if one else hidden_share(groups, device, sweeps, effort)
            tell("the share of a processor that a rank has")
            alone = alone_share(device, effort)
            tell("a sharded module")
            module = 0.0 if one else module_seconds(device, effort)
            tell("a step of dense layers")
            dense = dense_seconds(device, effort)
            machine = this_machine(groups.ranks_per_node, nodes=groups.nodes, device=device)
        memory: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(memory, (machine.ddr_bytes, machine.hbm_bytes or 0))
    except RuntimeError as error:  # of collectives whose partner is gone
        step = told[-1] if told else "nodes"
        raise SetupError(
            f"measuring {step} failed on rank {dist.get_rank()}: "
            f"{str(error).splitlines()[0]}. Has another rank ended? What it said comes first"
        ) from error
    # What the node with the least has.
    least = {"ddr_bytes": min(host for host, _ in memory)}
    if machine.hbm_bytes:
        least["hbm_bytes"] = min(gpu for _, gpu in memory)
    found = machine.model_copy(update=least)
    return MeasuredCluster(found, inside, between, sweeps, module, dense, hidden, alone, work)

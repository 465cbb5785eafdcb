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
    at_once,
    carried,
    fit_rates,
    hidden_share,
    seconds_spared,
    sweep,
)
from recd_plugin_tuning.cluster.dense_layers import dense_seconds
from recd_plugin_tuning.cluster.groups import node_groups
from recd_plugin_tuning.cluster.links import Link, between_nodes, inside_nodes
from recd_plugin_tuning.cluster.sharded_module import ModuleSeconds, module_seconds
from recd_plugin_tuning.cluster.timing import Effort, StepSeconds
from recd_plugin_tuning.cluster.work_rates import WorkRates, alone_share, measure_work
from recd_plugins.api import SetupError
from recd_plugins.api.planning import (
    COLLECTIVES,
    CollectiveRates,
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
        at_once: of an all-to-all with an all-reduce beside it, over one after the other; None of
            one rank.
        module: a step of a sharded module, however little it looks up.
        dense: a step of dense layers, however small they are, with its all-reduce.
        hidden: share of an all-reduce that is over when ranks have computed beside it.
        alone: of what a rank takes while all compute, the share that it takes while others wait.
        spared: seconds less that an all-to-all takes after a pause; 0 on one node.
        carried: a large all-to-all between nodes; None of one node.
        work: what ranks do by themselves.
    """

    machine: TopologySpec
    inside: Sequence[Link]
    between: Sequence[Link]
    sweeps: Sweeps
    at_once: float | None
    module: ModuleSeconds
    dense: StepSeconds
    hidden: float
    alone: float
    spared: float
    carried: StepSeconds | None
    work: WorkRates

    @property
    def collective(self) -> float:
        """Seconds of each of the collectives that a sharded module has in a step."""
        return max(0.0, self.module.step.wall - self.lookup) / COLLECTIVES

    @property
    def lookup(self) -> float:
        """Seconds of a rank with tables of a module, beside one without, while all compute."""
        of_kernel = self.work.lookup["lookups"]
        # What launches kernels of another device is no time of theirs.
        on_cpu = self.machine.device == "cpu"
        return max(of_kernel, self.module.with_tables / self.alone) if on_cpu else of_kernel

    @property
    def idle(self) -> float:
        """Of such small steps, the share in which processors have nothing to do."""
        return self._idle(self.module.step, self.dense)

    @property
    def idle_links(self) -> float:
        """The same of large all-to-alls between nodes; 1 where there are none."""
        return 1.0 if self.carried is None else self._idle(self.carried)

    def _idle(self, *steps: StepSeconds) -> float:
        busy = sum(step.processor for step in steps) / self.alone
        return max(0.0, 1 - busy / sum(step.wall for step in steps))

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
                    "lookups": self.lookup,
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
                "idle": self.idle,
                "idle_links": self.idle_links,
                "spared": self.spared,
                "other": {
                    "steps": max(0.0, self.dense.wall - reduced.get("steps", 0.0)),
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
            "at_once": self.at_once,
            "hidden": self.hidden,
            "alone": self.alone,
            "idle": self.idle,
            "idle_links": self.idle_links,
            "spared": self.spared,
            "collective": self.collective,
            "with_tables": self.module.with_tables,
            "dense": self.dense.wall,
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
            tell("an all-to-all and an all-reduce at once")
            one = groups.world_size == 1
            both = None if one else at_once(groups, device, sweeps, effort)
            tell("an all-reduce and matrix products at once")
            hidden = 0.0 if one else hidden_share(groups, device, sweeps, effort)
            tell("the share of a processor that a rank has")
            alone = alone_share(device, effort)
            tell("an all-to-all after a pause")
            spared = seconds_spared(groups, device, sweeps, effort) if groups.nodes > 1 else 0.0
            tell("processors while bytes travel")
            between_all = carried(groups, device, sweeps, effort) if groups.nodes > 1 else None
            tell("a sharded module")
            nothing = ModuleSeconds(StepSeconds(0.0, (0.0,)), 0.0)
            module = nothing if one else module_seconds(device, effort)
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
    return MeasuredCluster(
        found,
        inside,
        between,
        sweeps,
        both,
        module,
        dense,
        hidden,
        alone,
        spared,
        between_all,
        work,
    )

"""Plans a registry's model for a topology, with its plugins and without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchrec.distributed.planner import Topology

from recd_plugins.errors import NoPlanError
from recd_plugins.planning.candidates import Candidate, as_plain, with_plugins
from recd_plugins.planning.compute import Compute, measure_compute
from recd_plugins.planning.largest_batch import largest_batch
from recd_plugins.planning.report import PlanReport, SideReport, report_side
from recd_plugins.planning.stage_times import StageCosts
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.registry import Registry


@dataclass(frozen=True)
class Study:
    """What both sides are planned with.

    Attributes:
        name: of the topology.
        spec: its nodes and ranks.
        compute: of the model's dense parts and poolings.
        say: told what is being done, in words.
    """

    name: str
    spec: TopologySpec
    compute: Compute
    say: Callable[[str], None]

    def report(self, registry: Registry, batch_size: int | None) -> PlanReport:
        """Both plans, at ``batch_size`` rows a rank or each at the largest batch that fits.

        Raises:
            NoPlanError: the plan with the plugins does not fit.
            RecdError: registry, data and model do not go together.
        """
        plugins = with_plugins(registry)
        plain = as_plain(plugins)
        topology = self.spec.to_torchrec()
        mine = self._side("with the plugins", plugins, topology, batch_size)
        theirs, problem = None, ""
        try:
            theirs = self._side("plain", plain, topology, batch_size)
        except NoPlanError as error:
            problem = str(error)
        return PlanReport(
            self.name,
            self.spec,
            "measured, of the topology"
            if self.spec.costs
            else "bandwidths and operations a second of the topology: what none can be faster than",
            plugins.profile,
            mine,
            theirs,
            problem,
        )

    def _side(
        self, what: str, candidate: Candidate, topology: Topology, batch_size: int | None
    ) -> SideReport:
        largest = step = None
        if batch_size is None:
            largest, step = self._largest(what, candidate, topology)
            batch_size = largest
        self.say(f"planning {what}: batches of {batch_size:,} on {self.spec.world_size:,} ranks")
        kept = candidate.activation_bytes(self.compute, batch_size)
        return report_side(
            candidate,
            candidate.plan(topology, batch_size, kept),
            self.spec,
            batch_size=batch_size,
            largest_batch_size=largest,
            batch_step=step,
            compute=self.compute,
            costs=self.spec.costs or StageCosts.of_topology(self.spec),
        )

    def _largest(self, what: str, candidate: Candidate, topology: Topology) -> tuple[int, int]:
        def fits(batch_size: int) -> bool:
            self.say(f"looking for the largest batch {what}: {batch_size:,} rows a rank")
            kept = candidate.activation_bytes(self.compute, batch_size)
            return candidate.fits(topology, batch_size, kept)

        return largest_batch(fits, start=candidate.registry.training.batch_size)


def study(registry: Registry, name: str, spec: TopologySpec, say: Callable[[str], None]) -> Study:
    """Prepares the data as ``recd run`` does, and looks at its first rows.

    Raises:
        RecdError: the registry has no model, or the data is missing or wrong.
    """
    registry.dataset.prepare()
    say("counting what the model computes")
    return Study(name, spec, measure_compute(registry), say)

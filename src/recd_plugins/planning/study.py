"""Plans a registry's model for a topology, with its plugins and without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from recd_plugins.errors import DataError, NoPlanError
from recd_plugins.interfaces import Choice, StepShape
from recd_plugins.planning.candidates import Candidate, data_of_model, with_plugins
from recd_plugins.planning.compute import Compute, measure_compute
from recd_plugins.planning.largest_batch import largest_batch
from recd_plugins.planning.plan_report import PlanReport, SideReport, report_side
from recd_plugins.planning.prepared import Registry
from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.planning.work import computed_work

# By batch size.
_Candidates = Callable[[int], Candidate]


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
        data, start = data_of_model(registry), registry.training.batch_size
        at_start = with_plugins(registry, self.spec, data)
        plain = at_start.as_plain()

        @cache
        def plugins(rows: int) -> Candidate:
            # Table parts are made for a batch size.
            changed = registry.with_training({"batch_size": rows})
            return at_start if rows == start else with_plugins(changed, self.spec, data)

        mine = self._side("with the plugins", plugins, batch_size, start)
        theirs, problem = None, ""
        try:
            theirs = self._side("plain", lambda _: plain, batch_size, start)
        except NoPlanError as error:
            problem = str(error)
        return PlanReport(
            self.name,
            self.spec,
            "measured, of the topology"
            if self.spec.costs
            else "bandwidths and operations a second of the topology: what none can be faster than",
            data.profile(),
            mine,
            theirs,
            problem,
            self._chosen(plugins(mine.batch_size)),
        )

    def _chosen(self, candidate: Candidate) -> Choice | None:
        """What a chooser came to, with what the model computes besides."""
        prepared = candidate.prepared
        if prepared.chosen is None:
            return None
        step = StepShape(
            prepared.registry.training.batch_size,
            self.spec.world_size,
            self.spec.ranks_per_node,
            candidate.profile,
        )
        work = replace(computed_work(candidate.tables, self.compute, step), steps=0.0)
        costs = self.spec.costs or self.spec.least_costs
        return prepared.chosen.with_compute(predict_stages([work], costs))

    def _side(
        self, what: str, candidates: _Candidates, batch_size: int | None, start: int
    ) -> SideReport:
        largest = step = None
        topology = self.spec.to_torchrec()

        def fits(rows: int) -> bool:
            self.say(f"looking for the largest batch {what}: {rows:,} rows a rank")
            try:
                candidate = candidates(rows)
            except DataError as error:
                raise DataError(
                    f"looking for the largest batch {what}, at {rows:,} rows a rank: {error}; or "
                    "name a batch size"
                ) from error
            kept = candidate.activation_bytes(self.compute, rows)
            return candidate.fits(topology, rows, kept)

        if batch_size is None:
            largest, step = largest_batch(fits, start=start)
            batch_size = largest
        self.say(f"planning {what}: batches of {batch_size:,} on {self.spec.world_size:,} ranks")
        candidate = candidates(batch_size)
        kept = candidate.activation_bytes(self.compute, batch_size)
        return report_side(
            candidate,
            candidate.plan(topology, batch_size, kept),
            self.spec,
            batch_size=batch_size,
            largest_batch_size=largest,
            batch_step=step,
            compute=self.compute,
            costs=self.spec.costs or self.spec.least_costs,
        )


def study(registry: Registry, name: str, spec: TopologySpec, say: Callable[[str], None]) -> Study:
    """Prepares the data as ``recd run`` does, and looks at its first rows.

    Raises:
        RecdError: the registry has no model, or the data is missing or wrong.
    """
    registry.dataset.prepare()
    say("counting what the model computes")
    return Study(name, spec, measure_compute(registry), say)

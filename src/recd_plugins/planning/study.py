"""Plans a registry's model for a topology, with its plugins and without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from recd_plugins.data.wrapped_dataset import smallest_batch, wrapped_dataset
from recd_plugins.errors import DataError, NoPlanError, RecdError, RegistryError, SetupError
from recd_plugins.interfaces import Choice
from recd_plugins.planning.candidates import Candidate, data_of_model, with_plugins
from recd_plugins.planning.compute import Compute, measure_compute
from recd_plugins.planning.largest_batch import largest_batch
from recd_plugins.planning.machines import costs_source
from recd_plugins.planning.plan_report import PlanReport, SideReport, report_side
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.registry import RunConfig

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

    def report(self, registry: RunConfig, batch_size: int | None) -> PlanReport:
        """Both plans, at ``batch_size`` rows a rank or each at the largest batch that fits.

        Raises:
            NoPlanError: the plan with the plugins does not fit.
            RecdError: registry, data and model do not go together.
        """
        start = registry.training.batch_size
        if batch_size is not None and _too_few_rows(registry, 1, start):
            # The data is measured in batches of the file; none is needed that is not planned for.
            registry = registry.with_training({"batch_size": batch_size})
        data = data_of_model(registry)
        together = smallest_batch(wrapped_dataset(registry))
        find = partial(largest_batch, start=start, together=together)

        @cache
        def plugins(rows: int) -> Candidate:
            # Table parts are made for a batch size.
            changed = registry.with_training({"batch_size": rows})
            try:
                return with_plugins(changed, self.spec, data)
            except DataError as error:
                raise DataError(
                    f"a plan looks at a batch of the first rows, and {error}"
                ) from error

        mine = self._side("with the plugins", plugins, batch_size, find)
        plain = plugins(mine.batch_size).as_plain()
        theirs, problem = None, ""
        try:
            # What data is there for none, it is there for no other.
            theirs = self._side("plain", lambda _: plain, batch_size, find, mine)
        except SetupError as error:  # as where it fits nowhere
            problem = str(error)
        return PlanReport(
            self.name,
            self.spec,
            costs_source(self.name, self.spec),
            data.profile(),
            mine,
            theirs,
            problem,
            registry.training.wire,
            _chosen(plugins(mine.batch_size), mine),
            _too_few_rows(registry, self.spec.world_size, mine.batch_size),
        )

    def _side(
        self,
        what: str,
        candidates: _Candidates,
        batch_size: int | None,
        find: Callable[[Callable[[int], bool]], tuple[int, int]],
        other: SideReport | None = None,
    ) -> SideReport:
        largest = step = None
        one_fits, data_ends = False, dict[int, str]()  # why the data has no batch of a size
        refused: RecdError | None = None  # why there is no plan for the batch that was tried last
        topology = self.spec.to_torchrec()

        def fits(rows: int) -> bool:
            nonlocal one_fits, refused
            refused = None
            self.say(f"looking for the largest batch {what}: {rows:,} rows a rank")
            if other is not None and other.data_ends and rows > other.batch_size:
                data_ends[rows] = other.data_ends
                return False
            try:
                candidate = candidates(rows)
            except DataError as error:
                said = f"at {rows:,} rows a rank: {error}"
                if not one_fits:
                    said = f"looking for the largest batch {what}, {said}; or name a batch size"
                    raise DataError(said) from error
                data_ends[rows] = said
                return False
            except RecdError as error:
                if not _is_an_answer(error):
                    raise
                refused = error
                return False
            kept = candidate.activation_bytes(self.compute, rows)
            found = candidate.fits(topology, rows, kept)
            one_fits = one_fits or found
            return found

        if batch_size is None:
            try:
                largest, step = find(fits)
            except NoPlanError as error:
                raise (refused or error) from None
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
            data_ends=data_ends.get(batch_size + (step or 0), ""),
            compute=self.compute,
            costs=self.spec.costs or self.spec.least_costs,
        )


def _is_an_answer(error: RecdError) -> bool:
    """Whether there is no plan for a batch that is too large: for a chooser, or for an entry."""
    of_entry = isinstance(error, RegistryError) and isinstance(error.__cause__, SetupError)
    return of_entry or isinstance(error, NoPlanError)


def _chosen(candidate: Candidate, side: SideReport) -> Choice | None:
    """What a chooser came to, with what the model computes besides."""
    chosen = candidate.prepared.chosen
    return None if chosen is None else chosen.with_compute(side.seconds - side.seconds_of_tables)


def _too_few_rows(registry: RunConfig, ranks: int, batch_size: int) -> str:
    """Why the data has no batch for each rank; empty where it has.

    No reason to refuse a plan: it looks at the first rows alone, and they may be a sample.
    """
    try:
        wrapped_dataset(registry).reader(
            rank=0, world_size=ranks, batch_size=batch_size, split="train"
        )
    except DataError as error:
        return str(error)
    return ""


def study(registry: RunConfig, name: str, spec: TopologySpec, say: Callable[[str], None]) -> Study:
    """Prepares the data as ``recd run`` does, and looks at its first rows.

    Raises:
        RecdError: the registry has no model, or the data is missing or wrong.
    """
    wrapped_dataset(registry).prepare()
    say("counting what the model computes")
    return Study(name, spec, measure_compute(registry), say)

"""Shardings that choose, among what the others offer, what stands in their place."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from recd_plugins.errors import RecdError, RegistryError
from recd_plugins.interfaces.setting import PlanContext
from recd_plugins.interfaces.sharding import Sharding
from recd_plugins.interfaces.table_part import Section
from recd_plugins.values.rows import Table

if TYPE_CHECKING:
    from recd_plugins.values.stage_costs import StageCosts
    from recd_plugins.values.stages import StageTimes
    from recd_plugins.values.step_cost import StepCost


@dataclass(frozen=True)
class Candidate:
    """A sharding plugin with options.

    Attributes:
        use: name of the plugin.
        options: that it is made with.
    """

    use: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What tells offers apart."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.use} {self.written}" if self.options else self.use

    @property
    def written(self) -> str:
        """The options as a registry file has them."""
        options = (
            f"{name}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.options.items()
        )
        return f"{{{', '.join(options)}}}"

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"use": self.use, "options": dict(self.options)}


#: Offers with the names of their tables; tables that none has are left to the planner.
Offered = Sequence[tuple[Candidate, Sequence[str]]]


def _no_step(_: Collection[str]) -> StageTimes:
    raise ValueError("there is no plan, and no step to leave tables out of")


@dataclass(frozen=True)
class Evaluation:
    """What some offers come to, planned together.

    Attributes:
        seconds: of a step, without what the model computes; None where there is no plan.
        works: of each rank, likewise.
        error: why there is none.
        without: seconds of the step without some tables, by name.
    """

    seconds: StageTimes | None
    works: Sequence[StepCost] = ()
    error: RecdError | None = None
    without: Callable[[Collection[str]], StageTimes] = _no_step

    @property
    def why(self) -> str:
        """The error in words, without the place in the file, which is the chooser's."""
        if isinstance(self.error, RegistryError):
            return "; ".join(problem.message for problem in self.error.problems)
        return str(self.error)

    @property
    def total(self) -> float:
        """Seconds of the step; infinite where there is no plan."""
        return float("inf") if self.seconds is None else self.seconds.total


@dataclass(frozen=True)
class SearchContext(ABC):
    """What a chooser is asked, and may ask.

    Attributes:
        tables: to choose for.
        others: names of tables that other entries have.
        setting: of the model. The profile of its data has the distinct ids of all these tables.
        costs: of what a step does; what they have as free, and is not, takes what is assumed of it.
    """

    tables: Sequence[Table]
    others: Sequence[str]
    setting: PlanContext
    costs: StageCosts

    @abstractmethod
    def offers(self, tables: Sequence[Table]) -> Sequence[Candidate]:
        """What the plugins offer for tables that are alike; those that change no modules first.

        Raises:
            PluginError: a plugin fails, offers what are no options, or more than a thousand.
        """

    @abstractmethod
    def evaluate(self, offered: Offered, *, fast: bool = False) -> Evaluation:
        """What some offers come to, on a copy of the model.

        Args:
            offered: to plan together.
            fast: of a sample of the data, by few proposals.

        Raises:
            PluginError: a plugin failed; what is offered are no offers, or for tables that are not
                the chooser's, or come twice.
        """


@dataclass(frozen=True)
class Choice(Section, ABC):
    """What a chooser came to: the offers, and the section of the reports that says why.

    It is sent to other ranks, and its ``str()`` is the line that ``recd run`` says of it.

    Attributes:
        offered: stand in the chooser's place, in this order.
    """

    offered: Offered

    def with_compute(self, compute: StageTimes) -> Self:  # noqa: ARG002
        """The same, told of the seconds of a step that do not depend on the tables."""
        return self


class Chooser(Sharding, ABC):
    """A sharding in whose place others stand, which it chooses for all of its tables at once.

    It takes the tables that no other entry names, without ``tables`` all of them, and stands in a
    file once. ``prepare`` puts the entries that it chooses in its place, so that nothing
    after it meets it; what is not prepared sees tables that are left to the planner.
    """

    @abstractmethod
    def choose(self, question: SearchContext) -> Choice:
        """What is best. One rank chooses for all.

        Raises:
            RecdError: nothing can be; the error of a trial that has no plan, as a rule.
        """

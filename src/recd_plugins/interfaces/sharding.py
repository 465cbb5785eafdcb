"""Kinds ``sharding`` and ``cache``, and shardings that choose among others."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.interfaces.rows import Table
from recd_plugins.interfaces.tables import PlanContext, Section
from recd_plugins.runtime.errors import RecdError, RegistryError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.interfaces.step_cost import StageCosts, StageTimes, StepCost
    from recd_plugins.interfaces.tables import LookupKernels, PlanContext, TableStrategy


class SharderArguments(NamedTuple):
    """What a sharder of a plugin is made with, as the built-in ones are.

    Attributes:
        fused_params: FBGEMM's, of the registry or of the trainer.
        kernels: of tables that TorchRec's kernels are not to look up.
        coalesced: tables whose ids are made unique before they are sent.
        qcomm_codecs_registry: TorchRec's, of ``training.wire`` or of the trainer. Where there is
            one, a sharder that was not made with it is refused.
    """

    fused_params: dict[str, Any]
    kernels: tuple[LookupKernels, ...]
    coalesced: frozenset[str]
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None


class Sharding(Plugin, ABC):
    """Decides the sharding of the tables that its registry entry names.

    Overriding nothing leaves the tables to the planner.
    """

    kind: ClassVar[str] = "sharding"

    #: Whether each rank holds these tables whole. Their features then travel without
    #: deduplication, in an EmbeddingBagCollection of their own: TorchRec's data-parallel kernels
    #: do not take variable batches.
    replicates: ClassVar[bool] = False

    @classmethod
    def offers(
        cls,
        tables: Sequence[Table],  # noqa: ARG003
        setting: PlanContext,  # noqa: ARG003
    ) -> Sequence[Mapping[str, Any]]:
        """Options with which a chooser may try this plugin for tables that are alike.

        ``{}`` are the defaults; nothing, the default, keeps it out. Each offer is made, prepared
        and planned to predict its step, so only what may be the best for these tables is worth
        offering, and what the plugin does beside sharding by TorchRec's types has to be in the
        ``work`` and the memory of its part. One rank asks for all.

        Args:
            tables: of one module type, which are looked up alike.
            setting: of the model. The profile of its data has the distinct ids of a batch of all
                tables that are chosen for, whether they are coalesced or not.
        """
        return ()

    @property
    def coalesces(self) -> bool:
        """Whether each id of these tables is sent once a batch: docs/coalescing.md."""
        return False

    @property
    def may_replicate(self) -> bool:
        """Whether the planner may have small tables of these on every rank where it would not.

        Without it, it may so have bags of plain batches on CPU. It does where the dense optimizer
        has the rule of the tables', which the built-in loop's has.
        """
        return False

    def id_limit(self, table: Table) -> int | None:
        """Return the bound that ids of a table must stay below; None allows any 64-bit id.

        A plugin whose ``rewrite`` maps ids to rows by itself widens it. Ids are checked where
        batches are made.
        """
        return table.num_embeddings

    def rewrite(
        self,
        model: nn.Module,
        tables: Sequence[Table],  # noqa: ARG002
        setting: PlanContext,  # noqa: ARG002
    ) -> nn.Module:
        """Replace modules of ``model`` before planning; returns the model.

        Every rank calls it by itself and must come to the same.
        """
        return model

    def part(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: PlanContext,  # noqa: ARG002
    ) -> TableStrategy | None:
        """What it does to ``tables`` beyond sharding them by TorchRec's types; None: nothing.

        Called after ``rewrite``, and for a model that is never rewritten. Every rank calls it by
        itself and must come to the same.
        """
        return None

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """The planner's constraints by table name."""
        return {}

    def sharders(
        self,
        arguments: SharderArguments,  # noqa: ARG002
    ) -> Sequence[ModuleSharder[nn.Module]]:
        """Sharders for module types that ``rewrite`` put in; the built-in ones stay."""
        return ()


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


class Cache(Plugin, ABC):
    """Stores the tables that its registry entry names behind a cache.

    One with kernels of its own overrides ``part``; one that overrides ``constraints`` has a kernel
    of TorchRec's.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Refuse a device on which the cache cannot run.

        Raises:
            SetupError: says what is missing and what to do.
        """

    def part(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: PlanContext,  # noqa: ARG002
    ) -> TableStrategy | None:
        """What it does to ``tables``: kernels, memory, and what a run shows; None: nothing.

        Every rank calls it by itself and must come to the same.
        """
        return None

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """Kernel and cache parameters by table name, of tables that have a kernel of TorchRec's.

        Merged with the constraints of the sharding and of parts.
        """
        return {}

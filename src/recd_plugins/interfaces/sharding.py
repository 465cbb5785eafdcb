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
    """Arguments for a plugin's sharder, as for the built-in ones.

    Attributes:
        fused_params: FBGEMM's, of the registry or of the trainer.
        kernels: for tables that TorchRec's kernels do not look up.
        coalesced: tables whose ids are made unique before they are sent.
        qcomm_codecs_registry: TorchRec's, of ``training.wire`` or of the trainer. If there is one,
            sharders without it are refused.
    """

    fused_params: dict[str, Any]
    kernels: tuple[LookupKernels, ...]
    coalesced: frozenset[str]
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None


class Sharding(Plugin, ABC):
    """Decides the sharding of the tables of its entry; by default the planner does.

    Every rank calls ``rewrite``, ``part`` and ``constraints`` by itself and must get the same.
    """

    kind: ClassVar[str] = "sharding"

    #: Whether each rank holds these tables whole. Their features are not deduplicated and have an
    #: EmbeddingBagCollection of their own, as TorchRec's data-parallel kernels take no VBE input.
    replicates: ClassVar[bool] = False

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Return options with which a chooser may try this plugin; ``{}`` means the defaults.

        Each offer is prepared and planned to predict its step, so offer only what may be best. What
        the plugin does beside TorchRec's sharding types must be in the ``work`` and memory of its
        part. One rank asks for all.

        Args:
            tables: of one module type, looked up alike.
            setting: of the model. Its profile has the distinct ids of all tables to choose for,
                coalesced or not.
        """
        return ()

    @property
    def coalesces(self) -> bool:
        """Whether each id of these tables is sent once per batch: docs/coalescing.md."""
        return False

    @property
    def may_replicate(self) -> bool:
        """Whether the planner may replicate small tables that are deduplicated or on CUDA.

        It may always replicate bags of plain batches on CPU. The dense optimizer must have the rule
        of the tables', as in the built-in loop.
        """
        return False

    def id_limit(self, table: Table) -> int | None:
        """Return the exclusive bound of a table's ids, None for any 64-bit id.

        A plugin whose ``rewrite`` maps ids to rows widens it. Ids are checked where batches are
        made.
        """
        return table.num_embeddings

    def rewrite(self, model: nn.Module, tables: Sequence[Table], setting: PlanContext) -> nn.Module:
        """Replace modules of ``model`` before planning; return the model."""
        return model

    def part(self, tables: Sequence[Table], setting: PlanContext) -> TableStrategy | None:
        """Return the strategy of ``tables`` beyond TorchRec's sharding types, if any.

        Called after ``rewrite``, or for a model that is never rewritten.
        """
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return the planner's constraints by table name."""
        return {}

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        """Return sharders of module types that ``rewrite`` added, besides the built-in ones."""
        return ()


@dataclass(frozen=True)
class Candidate:
    """A sharding plugin with options.

    Attributes:
        use: name of the plugin.
        options: of it.
    """

    use: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Text that identifies the candidate."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.use} {self.written}" if self.options else self.use

    @property
    def written(self) -> str:
        """The options as in a registry file."""
        options = (
            f"{name}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.options.items()
        )
        return f"{{{', '.join(options)}}}"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"use": self.use, "options": dict(self.options)}


#: Candidates with the names of their tables; the planner decides about other tables.
Offered = Sequence[tuple[Candidate, Sequence[str]]]


def _no_step(_: Collection[str]) -> StageTimes:
    raise ValueError("there is no plan, and no step to leave tables out of")


@dataclass(frozen=True)
class Evaluation:
    """The predicted step of some candidates together.

    Attributes:
        seconds: of a step without the model's compute; None without a plan.
        works: cost of each rank, likewise.
        error: why there is no plan.
        without: returns the seconds of the step without some tables, by name.
    """

    seconds: StageTimes | None
    works: Sequence[StepCost] = ()
    error: RecdError | None = None
    without: Callable[[Collection[str]], StageTimes] = _no_step

    @property
    def why(self) -> str:
        """The error without its place in the file, which is the chooser's."""
        if isinstance(self.error, RegistryError):
            return "; ".join(problem.message for problem in self.error.problems)
        return str(self.error)

    @property
    def total(self) -> float:
        """Seconds of the step; infinite without a plan."""
        return float("inf") if self.seconds is None else self.seconds.total


@dataclass(frozen=True)
class SearchContext(ABC):
    """The task of a chooser, and the questions that it may ask.

    Attributes:
        tables: to choose for.
        others: names of the tables of other entries.
        setting: of the model. Its profile has the distinct ids of all tables to choose for.
        costs: rates of a step, with assumptions where nothing was measured.
    """

    tables: Sequence[Table]
    others: Sequence[str]
    setting: PlanContext
    costs: StageCosts

    @abstractmethod
    def offers(self, tables: Sequence[Table]) -> Sequence[Candidate]:
        """Return the plugins' offers for tables that are alike, first those without ``rewrite``.

        Raises:
            PluginError: a plugin fails or offers wrong options.
        """

    @abstractmethod
    def evaluate(self, offered: Offered, *, fast: bool = False) -> Evaluation:
        """Plan candidates together on a copy of the model and predict the step.

        Args:
            offered: the candidates, each table at most once.
            fast: use a sample of the data and few proposals.

        Raises:
            PluginError: a plugin fails, or ``offered`` is wrong.
        """


@dataclass(frozen=True)
class Choice(Section, ABC):
    """The result of a chooser, and the section of reports that explains it.

    It is pickled to other ranks; its ``str()`` is the line that ``recd run`` prints.

    Attributes:
        offered: the entries in the chooser's place, in order.
    """

    offered: Offered

    def with_compute(self, compute: StageTimes) -> Self:
        """Return the choice with the seconds of a step that do not depend on tables."""
        return self


class Chooser(Sharding, ABC):
    """A sharding that is replaced by others, which it chooses for all of its tables at once.

    A file has at most one. It takes the tables of no other entry. ``prepare`` replaces it; code
    that is not prepared leaves its tables to the planner.
    """

    @abstractmethod
    def choose(self, question: SearchContext) -> Choice:
        """Return the best choice; one rank chooses for all.

        Raises:
            RecdError: there is none, usually the error of an evaluation.
        """


class Cache(Plugin, ABC):
    """Puts a cache in front of the tables of its entry.

    Override ``part`` for kernels of its own, or ``constraints`` for one of TorchRec's. Every rank
    calls them by itself and must get the same.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Refuse a device on which the cache cannot run.

        Raises:
            SetupError: says what is missing and what to do.
        """

    def part(self, tables: Sequence[Table], setting: PlanContext) -> TableStrategy | None:
        """Return the strategy of ``tables``: kernels, memory and reports, if any."""
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return kernel and cache parameters by table name, for kernels of TorchRec.

        They are merged with the constraints of shardings and parts.
        """
        return {}

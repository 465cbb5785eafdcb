"""Plugin kinds ``sharding`` and ``cache``, and choosers among shardings."""

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
    """Arguments for a plugin's sharder.

    Attributes:
        fused_params: FBGEMM's parameters from the registry or the trainer.
        kernels: lookup kernels of tables without TorchRec's kernels.
        coalesced: tables whose ids are made unique before they are sent.
        qcomm_codecs_registry: codecs of ``training.wire`` or of the trainer, which a sharder must
            use.
    """

    fused_params: dict[str, Any]
    kernels: tuple[LookupKernels, ...]
    coalesced: frozenset[str]
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None


class Sharding(Plugin, ABC):
    """Decides the sharding of the tables of its entry, by default with TorchRec's planner.

    Every rank calls ``rewrite``, ``part`` and ``constraints`` and must get the same results.
    """

    kind: ClassVar[str] = "sharding"

    #: Whether each rank holds these tables whole. Their features are not deduplicated and have an
    #: EmbeddingBagCollection of their own, as data-parallel kernels do not support VBE.
    replicates: ClassVar[bool] = False

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Return options that a chooser may try on one rank; ``{}`` means the defaults.

        Each offer is planned to estimate its step. The part's ``work`` and memory must describe
        everything beyond TorchRec's sharding types.

        Args:
            tables: tables of one module type, looked up alike.
            setting: context with the distinct ids of all tables to choose for.
        """
        return ()

    @property
    def coalesces(self) -> bool:
        """Whether each id is sent once per batch."""
        return False

    @property
    def may_replicate(self) -> bool:
        """Whether the planner may replicate small tables that are deduplicated or on CUDA.

        Bags of plain batches on CPU may always be replicated.
        """
        return False

    def id_limit(self, table: Table) -> int | None:
        """Return the exclusive bound of a table's ids; None if ``rewrite`` maps any 64-bit id."""
        return table.num_embeddings

    def rewrite(self, model: nn.Module, tables: Sequence[Table], setting: PlanContext) -> nn.Module:
        """Replace modules of the model before planning, and return it."""
        return model

    def part(self, tables: Sequence[Table], setting: PlanContext) -> TableStrategy | None:
        """Return the strategy of the tables, if any; called after ``rewrite``."""
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return the planner's constraints by table name."""
        return {}

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        """Return the sharders of module types that ``rewrite`` added."""
        return ()


@dataclass(frozen=True)
class Candidate:
    """Name and options of a sharding plugin to try."""

    use: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Identifying text."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.use} {self.written}" if self.options else self.use

    @property
    def written(self) -> str:
        """Options as in a registry file."""
        options = (
            f"{name}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.options.items()
        )
        return f"{{{', '.join(options)}}}"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"use": self.use, "options": dict(self.options)}


#: Candidates with the names of their tables. The planner shards the other tables.
Offered = Sequence[tuple[Candidate, Sequence[str]]]


def _no_step(_: Collection[str]) -> StageTimes:
    raise ValueError("there is no plan, and no step to leave tables out of")


@dataclass(frozen=True)
class Evaluation:
    """Estimated step of several candidates together.

    Attributes:
        seconds: step without the model's compute; None without a plan.
        works: cost of each rank without the model's compute.
        error: reason for a missing plan.
        without: returns the step without the named tables.
    """

    seconds: StageTimes | None
    works: Sequence[StepCost] = ()
    error: RecdError | None = None
    without: Callable[[Collection[str]], StageTimes] = _no_step

    @property
    def why(self) -> str:
        """Message of the error without its place in the file."""
        if isinstance(self.error, RegistryError):
            return "; ".join(problem.message for problem in self.error.problems)
        return str(self.error)

    @property
    def total(self) -> float:
        """Seconds of the step, infinite without a plan."""
        return float("inf") if self.seconds is None else self.seconds.total


@dataclass(frozen=True)
class SearchContext(ABC):
    """Task of a chooser, with candidates and their evaluation.

    Attributes:
        tables: tables to choose for.
        others: names of the tables of other entries.
        setting: context with the distinct ids of all tables to choose for.
        costs: measured or assumed rates of a step.
    """

    tables: Sequence[Table]
    others: Sequence[str]
    setting: PlanContext
    costs: StageCosts

    @abstractmethod
    def offers(self, tables: Sequence[Table]) -> Sequence[Candidate]:
        """Return the plugins' offers for similar tables, plugins without ``rewrite`` first.

        Raises:
            PluginError: a plugin fails or offers wrong options.
        """

    @abstractmethod
    def evaluate(self, offered: Offered, *, fast: bool = False) -> Evaluation:
        """Plan candidates together on a copy of the model and estimate the step.

        Args:
            offered: candidates with disjoint tables.
            fast: use a sample of the data and few proposals.

        Raises:
            PluginError: a plugin fails, or ``offered`` is wrong.
        """


@dataclass(frozen=True)
class Choice(Section, ABC):
    """Result of a chooser, pickled to other ranks, and its section of reports.

    ``recd run`` prints its ``str()``. The entries ``offered`` replace the chooser, in order.
    """

    offered: Offered

    def with_compute(self, compute: StageTimes) -> Self:
        """Return the choice with the part of a step that does not depend on tables."""
        return self


class Chooser(Sharding, ABC):
    """Sharding that replaces itself by others, chosen for all tables without another entry.

    A file has at most one.
    """

    @abstractmethod
    def choose(self, question: SearchContext) -> Choice:
        """Return the best choice, on one rank; RecdError if there is none."""


class Cache(Plugin, ABC):
    """Puts a cache in front of the tables of its entry.

    Override ``part`` for kernels of the plugin, or ``constraints`` for a kernel of TorchRec. Every
    rank calls them and must get the same results.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Check that the cache runs on a device; SetupError if not."""

    def part(self, tables: Sequence[Table], setting: PlanContext) -> TableStrategy | None:
        """Return the strategy of the tables, if any: kernels, memory and reports."""
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return kernel and cache parameters by table name, for kernels of TorchRec."""
        return {}

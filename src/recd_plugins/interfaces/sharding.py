"""Plugin kinds ``sharding`` and ``cache``, and choosers, which select sharding plugins."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.interfaces.rows import Table
from recd_plugins.interfaces.tables import PlanContext, Section
from recd_plugins.runtime.errors import RecdError, RegistryError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.interfaces.step_cost import StageCosts, StageTimes
    from recd_plugins.interfaces.tables import LookupKernels, PlanContext, TableStrategy


class SharderArguments(NamedTuple):
    """Arguments for a plugin's sharder.

    Attributes:
        fused_params: FBGEMM parameters from the registry file or the trainer.
        kernels: lookup kernels of the tables that do not use TorchRec's kernels.
        coalesced: tables whose ids are made unique before they are sent.
        qcomm_codecs_registry: codecs from ``training.wire`` or the trainer. The sharder must use
            them.
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

    #: Whether each rank holds a full copy of these tables. Their features are not deduplicated and
    #: have a separate EmbeddingBagCollection, because data-parallel kernels do not support VBE.
    replicates: ClassVar[bool] = False

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Return the sets of options that a chooser may try; ``{}`` means the defaults.

        One rank calls it. The chooser plans each set of options to estimate the step time.
        ``work`` and ``row_memory`` of the strategy must cover all costs beyond those of TorchRec's
        sharding types.

        Args:
            tables: tables of one module type with similar lookups.
            context: planning context, with the distinct ids of all tables to choose for.
        """
        return ()

    @property
    def coalesces(self) -> bool:
        """Whether each id is sent once per batch."""
        return False

    @property
    def may_replicate(self) -> bool:
        """Return whether the planner may replicate small tables with deduplicated input or on CUDA.

        It may always replicate pooled tables with plain input on the CPU.
        """
        return False

    def id_limit(self, table: Table) -> int | None:
        """Return the exclusive bound of a table's ids; None if ``rewrite`` maps any 64-bit id."""
        return table.num_embeddings

    def rewrite(self, model: nn.Module, tables: Sequence[Table], context: PlanContext) -> nn.Module:
        """Replace modules of the model before planning, and return it."""
        return model

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> TableStrategy | None:
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
    """Name and options of a sharding plugin that a chooser may try."""

    use: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return a text that identifies the candidate."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.use} {self.written}" if self.options else self.use

    @property
    def written(self) -> str:
        """Return the options as they are written in a registry file."""
        options = (
            f"{name}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.options.items()
        )
        return f"{{{', '.join(options)}}}"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"use": self.use, "options": dict(self.options)}


#: Candidates, each with the names of its tables. TorchRec's planner shards all other tables.
Offered = Sequence[tuple[Candidate, Sequence[str]]]


def _no_step(_: Collection[str]) -> StageTimes:
    raise ValueError("the evaluation has no plan, so no step time can be estimated")


@dataclass(frozen=True)
class Evaluation:
    """Estimated training step with several candidates together.

    Attributes:
        seconds: stage times of the step without dense compute; None without a plan.
        error: reason why there is no plan.
        without: function that estimates the step without the named tables.
    """

    seconds: StageTimes | None
    error: RecdError | None = None
    without: Callable[[Collection[str]], StageTimes] = _no_step

    @property
    def why(self) -> str:
        """Return the message of the error without file and line."""
        if isinstance(self.error, RegistryError):
            return "; ".join(problem.message for problem in self.error.problems)
        return str(self.error)

    @property
    def total(self) -> float:
        """Return the seconds of the step; infinity without a plan."""
        return float("inf") if self.seconds is None else self.seconds.total


@dataclass(frozen=True)
class SearchContext(ABC):
    """Input of a chooser: tables to choose for, candidates, and a cost model to evaluate them.

    Attributes:
        tables: tables to choose for.
        others: names of the tables that other entries match.
        context: planning context, with the distinct ids of all tables to choose for.
        costs: measured or assumed cost rates of a step.
    """

    tables: Sequence[Table]
    others: Sequence[str]
    context: PlanContext
    costs: StageCosts

    @abstractmethod
    def offers(self, tables: Sequence[Table]) -> Sequence[Candidate]:
        """Return the candidates of all sharding plugins for similar tables.

        Plugins without ``rewrite`` come first.

        Raises:
            PluginError: a plugin fails or returns invalid options.
        """

    @abstractmethod
    def evaluate(self, offered: Offered, *, fast: bool = False) -> Evaluation:
        """Plan candidates together on a copy of the model and estimate the step.

        Args:
            offered: candidates with disjoint tables.
            fast: use a sample of the data and few proposals.

        Raises:
            PluginError: a plugin fails, or ``offered`` is invalid.
        """


@dataclass(frozen=True)
class Choice(Section, ABC):
    """Result of a chooser, and its section in reports. It is pickled to the other ranks.

    ``recd run`` prints its ``str()``. The candidates in ``offered`` replace the chooser's entry, in
    order.
    """

    offered: Offered


class Chooser(Sharding, ABC):
    """Sharding plugin that selects other sharding plugins for the tables of its entry.

    Tables that other entries match are excluded. A registry file has at most one chooser.
    """

    @abstractmethod
    def choose(self, question: SearchContext) -> Choice:
        """Return the best choice. Only one rank calls it. Raises RecdError if there is none."""


class Cache(Plugin, ABC):
    """Puts a cache in front of the tables of its entry.

    Override ``part`` to use the plugin's own kernels, or ``constraints`` to use a TorchRec kernel.
    Every rank calls both and must get the same results.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Check that the cache supports a device. Raises SetupError if not."""

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> TableStrategy | None:
        """Return the strategy of the tables, if any: kernels, memory and reports."""
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return kernel and cache parameters by table name, for kernels of TorchRec."""
        return {}

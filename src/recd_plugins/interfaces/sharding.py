"""Base classes of sharding plugins, cache plugins and automatic choosers of sharding."""

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
    from torch import Tensor, nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.interfaces.step_cost import StageCosts, StageTimes
    from recd_plugins.interfaces.tables import LookupKernels, PlanContext, TableStrategy


class SharderArguments(NamedTuple):
    """Arguments to create the TorchRec sharders of a plugin.

    Attributes:
        fused_params: FBGEMM parameters from the registry file or the trainer.
        kernels: lookup kernels that replace TorchRec's kernels for some tables.
        coalesced: names of tables whose ids are deduplicated before the all-to-all.
        qcomm_codecs_registry: TorchRec codecs that the sharder must use, from ``training.wire`` or
            the trainer.
    """

    fused_params: dict[str, Any]
    kernels: tuple[LookupKernels, ...]
    coalesced: frozenset[str]
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None


class Sharding(Plugin, ABC):
    """Plugin that controls how tables are sharded, by default with TorchRec's planner.

    The plugin gets the tables that match its entry in registry.yaml. Every rank calls ``rewrite``,
    ``strategy`` and ``constraints`` and must get the same results.
    """

    kind: ClassVar[str] = "sharding"

    #: Whether each rank holds a full copy of these tables. Their features are not deduplicated and
    #: have a separate EmbeddingBagCollection, because data-parallel kernels do not support VBE.
    replicates: ClassVar[bool] = False

    #: Whether modules of ``rewrite`` map input ids to rows. These modules must also work unsharded,
    #: in evaluation mode, with the weights and buffers of a checkpoint. Their method
    #: ``rows_of(table)`` returns an exportable module that maps ids, int64 ``[n]``, to rows.
    maps_ids: ClassVar[bool] = False

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Return sets of options that the automatic search may evaluate; ``{}`` is the defaults.

        Called on one rank. The search plans with each set of options to estimate the step time.
        ``TableStrategy.work`` and ``row_memory`` must return all costs that TorchRec's sharding
        types do not have.

        Args:
            tables: tables of one module type with similar lookups.
            context: planning context. Its numbers of distinct ids are known for ``tables``.
        """
        return ()

    @property
    def coalesces(self) -> bool:
        """Whether the all-to-all sends each distinct id of a batch only once."""
        return False

    @property
    def may_replicate(self) -> bool:
        """Return whether the planner may replicate small sequence and deduplicated tables on CPU.

        Pooled tables with plain input, and sequence tables on CUDA, need no permission.
        """
        return False

    def id_limit(self, table: Table) -> int | None:
        """Return the exclusive bound of input ids; None if ``rewrite`` maps any 64-bit id."""
        return table.num_embeddings

    def ids_of_rows(self, table: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return the input id of each row of a trained table, for plugins with ``maps_ids``.

        Args:
            table: name of the table.
            read: function that returns the buffer of a checkpoint whose name ends in the argument.

        Returns:
            int64 ``[num_embeddings]``, with -1 for rows without an id.
        """
        raise NotImplementedError

    def rewrite(self, model: nn.Module, tables: Sequence[Table], context: PlanContext) -> nn.Module:
        """Return the model, in which modules may have been replaced. Called before planning."""
        return model

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> TableStrategy | None:
        """Return kernels, costs and reports for the tables, if any. Called after ``rewrite``."""
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return constraints for TorchRec's planner, keyed by table name."""
        return {}

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        """Return TorchRec sharders for the module types that ``rewrite`` added."""
        return ()


@dataclass(frozen=True)
class Candidate:
    """Name and options of a sharding plugin that the automatic search may evaluate."""

    use: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return a string that identifies the plugin and its options."""
        return f"{self.use} {json.dumps(self.options, sort_keys=True, default=str)}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.use} {self.written}" if self.options else self.use

    @property
    def written(self) -> str:
        """Return the options in YAML syntax, as in registry.yaml."""
        options = (
            f"{name}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.options.items()
        )
        return f"{{{', '.join(options)}}}"

    def as_json(self) -> dict[str, Any]:
        """Return plugin name and options as a JSON object."""
        return {"use": self.use, "options": dict(self.options)}


#: Candidates, each with the names of its tables. TorchRec's planner shards all other tables.
Offered = Sequence[tuple[Candidate, Sequence[str]]]


def _no_step(_: Collection[str]) -> StageTimes:
    raise ValueError("the evaluation has no plan, so no step time can be estimated")


@dataclass(frozen=True)
class Evaluation:
    """Estimated step time of a plan with candidates for one or more sets of tables.

    Attributes:
        seconds: estimated stage times without dense compute; None if planning failed.
        error: reason why planning failed.
        without: function of table names that returns the stage times without these tables.
    """

    seconds: StageTimes | None
    error: RecdError | None = None
    without: Callable[[Collection[str]], StageTimes] = _no_step

    @property
    def why(self) -> str:
        """Return the error message of failed planning, without file and line."""
        if isinstance(self.error, RegistryError):
            return "; ".join(problem.message for problem in self.error.problems)
        return str(self.error)

    @property
    def total(self) -> float:
        """Return the estimated seconds per step; infinity if planning failed."""
        return float("inf") if self.seconds is None else self.seconds.total


@dataclass(frozen=True)
class SearchContext(ABC):
    """Input of a chooser: its tables, sharding candidates, and a cost model to compare them.

    Attributes:
        tables: tables for which the chooser selects sharding plugins.
        others: names of the tables that other ``sharding`` entries match.
        context: planning context, with the distinct ids of all of ``tables``.
        costs: measured or assumed cost rates of a training step.
    """

    tables: Sequence[Table]
    others: Sequence[str]
    context: PlanContext
    costs: StageCosts

    @abstractmethod
    def offers(self, tables: Sequence[Table]) -> Sequence[Candidate]:
        """Return the candidates of all sharding plugins for tables with similar lookups.

        Plugins that do not override ``rewrite`` come first.

        Raises:
            PluginError: a plugin fails or returns invalid options.
        """

    @abstractmethod
    def evaluate(self, offered: Offered, *, fast: bool = False) -> Evaluation:
        """Plan a copy of the model with the given candidates, and estimate the step time.

        Args:
            offered: candidates, each with the names of its tables.
            fast: whether to use a sample of the data and only a few planner proposals.

        Raises:
            PluginError: a plugin fails, or ``offered`` is invalid.
        """


@dataclass(frozen=True)
class Choice(Section, ABC):
    """The sharding plugins that a ``Chooser`` selected, and its report section. Picklable.

    ``recd run`` prints ``str(choice)``, and shards tables with the plugins in ``offered`` instead
    of the chooser.
    """

    offered: Offered


class Chooser(Sharding, ABC):
    """Sharding plugin that selects other sharding plugins by estimated step time.

    A chooser selects for the tables of its registry.yaml entry, except tables that match other
    entries. A file has at most one chooser.
    """

    @abstractmethod
    def choose(self, question: SearchContext) -> Choice:
        """Return the selected plugins. Called on one rank. Raises RecdError if none works."""


class Cache(Plugin, ABC):
    """Plugin that caches rows of the tables of its registry.yaml entry.

    Override ``strategy`` to use kernels of the plugin, or ``constraints`` to use a TorchRec kernel.
    Every rank calls both methods and must get the same results.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Check that the cache supports a device. Raises SetupError if not."""

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> TableStrategy | None:
        """Return kernels, memory and reports for the tables, if any."""
        return None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return compute kernel and cache parameters of TorchRec, keyed by table name."""
        return {}

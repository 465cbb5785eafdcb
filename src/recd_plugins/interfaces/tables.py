"""Interfaces through which plugins change kernels, costs and optimizers of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, StrictInt

from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds
from recd_plugins.interfaces.plugin import Plugin, PluginOptions
from recd_plugins.interfaces.rows import Table
from recd_plugins.interfaces.step_cost import CollectiveRates, StageCosts

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType
    from torch import nn
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption
    from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig

    from recd_plugins.interfaces.step_cost import Channel, StepCost


class TrainingData(ABC):
    """Statistics of the training data. Methods raise DataError for missing or wrong data."""

    @abstractmethod
    def profile(self) -> DataProfile:
        """Return lengths and duplication of the model's features."""

    @abstractmethod
    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return how often each table row is looked up. The result is the same on every rank.

        Args:
            tables: tables of the model.
            rows: number of first rows of the training split to read; None for all.
            deduplicated: whether to count only the unique rows of batches for tables whose features
                are deduplicated.
        """

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        """Return the distinct ids per batch, keyed by table name, where known."""
        return {}


@dataclass(frozen=True)
class PlanContext:
    """Inputs of planning: ranks, batch size, optimizer, hardware rates and training data.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: ranks per node; divides ``world_size``.
        batch_size: rows per rank.
        optimizer: table optimizer, ``sgd`` or ``rowwise_adagrad``.
        device_type: ``cpu`` or ``cuda``.
        rates: latencies and bandwidths of collectives.
        data: training data.
        memory_bytes: bytes that a rank has for tables; None if unknown.
        costs: measured cost rates of a step, or lower bounds; None if unknown.
        topology: topology for TorchRec's planner; None if all machines equal this machine.
        measured: whether ``costs`` were measured.
        wire_bytes: bytes per scalar in all-to-alls (``training.wire``).
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    optimizer: str
    device_type: str
    rates: CollectiveRates
    data: TrainingData
    memory_bytes: int | None = None
    costs: StageCosts | None = None
    topology: Topology | None = None
    measured: bool = True
    wire_bytes: float = 4.0

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.ranks_per_node


class LookupKernels(ABC):
    """Creates lookup kernels that replace TorchRec's kernels for some tables.

    If training changes rows without a lookup on the same rank, the kernel or its sharded module
    defines a method ``track_changed_rows(mark)`` for ``ChangedRows``.

    Attributes:
        compute_kernel: name of the TorchRec compute kernel in sharding plans of these tables.
    """

    compute_kernel: str

    @property
    @abstractmethod
    def tables(self) -> Collection[str]:
        """Return the names of all tables with these kernels, from any module."""

    @abstractmethod
    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> nn.Module:
        """Return a pooled lookup module for grouped tables, with TorchRec's arguments."""

    @abstractmethod
    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> nn.Module:
        """Return an unpooled lookup module for grouped tables, with TorchRec's arguments."""

    def as_planned(
        self, params: Mapping[str, ParameterSharding], configs: Iterable[BaseEmbeddingConfig]
    ) -> Self:
        """Return the kernels for one module, given the sharding plan of its tables."""
        return self

    def prefetches(self, table: str) -> bool:
        """Return whether the kernels prefetch a table's rows before the batch's lookup."""
        return False


class RowMemory(NamedTuple):
    """Memory of a table shard's rows, including optimizer state.

    Attributes:
        there: bytes on the device that looks up the rows.
        on_host: additional bytes in host memory, for tables that a GPU looks up.
        optimizer: bytes of optimizer state, included in ``there``.
    """

    there: int
    on_host: int
    optimizer: int


class StepShape(NamedTuple):
    """Sizes on which a step's cost depends. ``wire_bytes`` is the bytes per sent scalar."""

    batch_size: int
    world_size: int
    ranks_per_node: int
    profile: DataProfile
    wire_bytes: float = 4


@dataclass(frozen=True)
class TrainedRun:
    """Results of a finished run, equal on every rank, from which report sections are made.

    Attributes:
        model: the sharded module inside DistributedModelParallel.
        plan: sharding plan.
        tables: tables of the model.
        context: planning context.
        sent: bytes that all ranks send per step, keyed by (process group, kind of collective) as in
            ``TableStrategy.channels``; None for short runs.
        observed: result of ``TableStrategy.observe`` on each rank.
    """

    model: nn.Module
    plan: ShardingPlan
    tables: Sequence[Table]
    context: PlanContext
    sent: Mapping[str, float] | None
    observed: Sequence[Any]


class Section(ABC):
    """Section of the report of ``recd run``. ``name`` is the section's key in JSON reports."""

    name: ClassVar[str]

    @abstractmethod
    def as_json(self) -> Any:
        """Return the section as JSON values."""

    @abstractmethod
    def shown(self, run: str) -> Sequence[RenderableType]:
        """Return rich renderables for the terminal. ``run`` is the run's name in a comparison."""


class TableStrategy:
    """Kernels, costs and reports that a ``sharding:`` or ``cache:`` entry defines for its tables.

    Every method is optional. Each rank creates its own object.
    """

    #: Whether ``optimizers:`` entries may match its tables. False if the strategy updates rows
    #: itself or depends on the optimizer of the ``training`` section.
    follows_optimizers: ClassVar[bool] = False

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return planner constraints, keyed by table name.

        If another strategy also sets a field for a table, both must set the same value.
        """
        return {}

    @classmethod
    def kernels(cls, parts: Sequence[Self]) -> LookupKernels | None:
        """Return the kernels for all strategies of this class; None for TorchRec's kernels."""
        return None

    def needs_stock_kernels(self) -> Mapping[str, str]:
        """Return a dict from tables that cannot use kernels of another plugin to the reason.

        The reason completes an error message that starts with the plugin and its entry.
        """
        return {}

    # Costs of a step, for the planner and `recd plan`.

    def sharded_share(self, table: str) -> float:
        """Return the fraction of a table's ids that are looked up in sharded rows."""
        return 1.0

    def row_memory(
        self, option: ShardingOption, shard: Shard, optimizer: str, device_type: str
    ) -> RowMemory | None:
        """Return the memory of a shard's rows; None if TorchRec's estimate applies."""
        return None

    def fetch_bandwidth(self, table: str) -> float | None:
        """Return the bytes per second at which cache misses are read; None for host memory."""
        return None

    def memory_of_rank(self, ranks_per_node: int, optimizer: str) -> Mapping[str, int]:
        """Return a dict from purpose to additional bytes that a rank needs, besides tables."""
        return {}

    def activation_bytes(self, table: Table, ids: float) -> float:
        """Return the additional activation bytes of a forward pass with ``ids`` ids."""
        return 0.0

    def work(
        self, table: Table, sharding: ParameterSharding, step: StepShape
    ) -> Iterable[tuple[slice, StepCost]]:
        """Return pairs of a slice of ranks and the additional cost of a table on these ranks."""
        return ()

    def collectives(self, tables: Collection[str]) -> int:
        """Return how many additional collectives a module with these tables runs per step."""
        return 0

    def figures(self, table: str) -> Mapping[str, Any]:
        """Return additional JSON values about a table for ``recd plan --json``."""
        return {}

    def describe(self, table: str) -> Sequence[str]:
        """Return additional lines of text about a table for ``recd plan``."""
        return ()

    # Reports of a run.

    def channels(self, model: nn.Module) -> Mapping[Channel, str]:
        """Return a dict from (process group, collective) to a label of its bytes in reports."""
        return {}

    @classmethod
    def observe(cls, parts: Sequence[Self], model: nn.Module, steps: int) -> Any:
        """Return counts of this rank, such as cache hits, over the last ``steps`` steps."""
        return None

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        """Return the report sections of all strategies of this class."""
        return ()


class RowUpdate(NamedTuple):
    """Optimizer of a table, which TorchRec applies in the backward pass.

    Attributes:
        optimizer: class of ``torchrec.optim`` or ``torch.optim`` with an FBGEMM kernel.
        arguments: arguments of ``apply_optimizer_in_backward``, such as ``lr`` and ``eps``. The
            ``training`` section defines the defaults.
    """

    optimizer: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]


class Optimizer(Plugin, ABC):
    """Plugin that selects the optimizer of tables that match its registry.yaml entry."""

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def update(self, table: Table) -> RowUpdate:
        """Return the optimizer of a table. The result must be the same on every rank."""


class AccessOptions(PluginOptions):
    """Base class of options of plugins that need to know how often table rows are read."""

    profile: Path | None = Field(
        default=None,
        description="Access profile written by `recd profile`; null counts accesses at startup.",
    )
    profile_rows: Annotated[StrictInt, Field(gt=0)] | None = Field(
        default=65_536,
        description="Number of first rows of the training split to count at startup; null counts "
        "all.",
    )

    def accesses(
        self, tables: Sequence[Table], context: PlanContext, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return how often each row of ``tables`` is looked up.

        Args:
            tables: tables of the model.
            context: planning context. Its training data is counted if there is no profile file.
            deduplicated: as in ``TrainingData.access``. Ignored for a profile file.

        Raises:
            DataError: the data cannot be read, or the file is not an access profile.
        """
        if self.profile is None:
            return context.data.access(tables, self.profile_rows, deduplicated=deduplicated)
        return AccessProfile.load(self.profile)

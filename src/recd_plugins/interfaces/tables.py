"""Table strategies, lookup kernels, optimizers, and the planning context."""

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
    """Lazy measurements of the data. Methods raise DataError for missing or wrong data."""

    @abstractmethod
    def profile(self) -> DataProfile:
        """Return lengths and dedupe factors of the model's features."""

    @abstractmethod
    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return the access counts of the rows of tables. They are the same on every rank.

        Args:
            tables: tables of the model.
            rows: number of first rows of the training split to read; None for all.
            deduplicated: whether to count only the unique rows of batches for tables whose features
                are deduplicated.
        """

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        """Return the distinct ids of a batch for each table where they are known."""
        return {}


@dataclass(frozen=True)
class PlanContext:
    """Planning context: the ranks that a model is sharded for, and their data.

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
        topology: topology for TorchRec's planner; None if all machines are like this one.
        measured: whether ``costs`` were measured.
        wire_bytes: bytes of a scalar sent between ranks (``training.wire``).
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
    """Creates lookup kernels for some tables.

    Attributes:
        compute_kernel: TorchRec's kernel name in plans of these tables.
    """

    compute_kernel: str

    @property
    @abstractmethod
    def tables(self) -> Collection[str]:
        """Return the names of the tables, which may belong to several modules."""

    @abstractmethod
    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> nn.Module:
        """Return the kernel for a group of these tables with pooling. Arguments as in TorchRec."""

    @abstractmethod
    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> nn.Module:
        """Return the kernel for a group of these tables without pooling."""

    def as_planned(
        self, params: Mapping[str, ParameterSharding], configs: Iterable[BaseEmbeddingConfig]
    ) -> Self:
        """Return the kernels of one module, given the plan of its tables."""
        return self

    def prefetches(self, table: str) -> bool:
        """Return whether the kernels prefetch a table's rows before their batch."""
        return False


class RowMemory(NamedTuple):
    """Bytes of a shard's rows including optimizer state.

    Attributes:
        there: bytes on the device that looks the rows up.
        on_host: additional bytes in host memory, for tables that a GPU looks up.
        optimizer: bytes of optimizer state, included in ``there``.
    """

    there: int
    on_host: int
    optimizer: int


class StepShape(NamedTuple):
    """Sizes that the cost of a step depends on; ``wire_bytes`` are the bytes per sent scalar."""

    batch_size: int
    world_size: int
    ranks_per_node: int
    profile: DataProfile
    wire_bytes: float = 4


@dataclass(frozen=True)
class TrainedRun:
    """Results of a finished run for report sections. They are the same on every rank.

    Attributes:
        model: the sharded model, without its DistributedModelParallel.
        plan: sharding plan.
        tables: tables of the model.
        context: planning context.
        sent: bytes that all ranks send per step, by channel; None for short runs.
        observed: results of ``TableStrategy.observe``, one per rank.
    """

    model: nn.Module
    plan: ShardingPlan
    tables: Sequence[Table]
    context: PlanContext
    sent: Mapping[str, float] | None
    observed: Sequence[Any]


class Section(ABC):
    """Section of the report of ``recd run``; ``name`` is its key in the JSON report."""

    name: ClassVar[str]

    @abstractmethod
    def as_json(self) -> Any:
        """Return JSON values."""

    @abstractmethod
    def shown(self, run: str) -> Sequence[RenderableType]:
        """Return rich renderables for the terminal; ``run`` names the run in a comparison."""


class TableStrategy:
    """Kernels, costs and reports that a ``sharding:`` or ``cache:`` entry defines for its tables.

    Every method is optional. Each process creates its own object for a ``PlanContext``.
    """

    #: Whether ``optimizers:`` entries may match its tables. False if the strategy updates rows
    #: itself or depends on the optimizer of the ``training`` section.
    follows_optimizers: ClassVar[bool] = False

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return planner constraints by table name. They must agree with those of the plugin."""
        return {}

    @classmethod
    def kernels(cls, parts: Sequence[Self]) -> LookupKernels | None:
        """Return the lookup kernels for all strategies of this class; None for TorchRec's."""
        return None

    def needs_stock_kernels(self) -> Mapping[str, str]:
        """Return the tables that cannot use the kernels of another entry.

        Maps the table name to the reason, which completes a message that starts with the entry.
        """
        return {}

    # Costs of a step, for the planner and `recd plan`.

    def sharded_share(self, table: str) -> float:
        """Return the share of a table's ids that are looked up in the table's shards."""
        return 1.0

    def row_memory(
        self, option: ShardingOption, shard: Shard, optimizer: str, device_type: str
    ) -> RowMemory | None:
        """Return the memory of a shard's rows; None if TorchRec's kernels define it."""
        return None

    def fetch_bandwidth(self, table: str) -> float | None:
        """Return the bytes per second for fetching missing rows; None for host memory."""
        return None

    def memory_of_rank(self, ranks_per_node: int, optimizer: str) -> Mapping[str, int]:
        """Return additional bytes of a rank in a backward pass, by purpose. Excludes tables."""
        return {}

    def activation_bytes(self, table: Table, ids: float) -> float:
        """Return the additional activation bytes that a forward pass with ``ids`` ids keeps."""
        return 0.0

    def work(
        self, table: Table, sharding: ParameterSharding, step: StepShape
    ) -> Iterable[tuple[slice, StepCost]]:
        """Return additional costs of a table, each with the slice of ranks that have the cost."""
        return ()

    def collectives(self, tables: Collection[str]) -> int:
        """Return the additional collectives per step of a module with these tables."""
        return 0

    def figures(self, table: str) -> Mapping[str, Any]:
        """Return JSON values of a table for ``recd plan --json``."""
        return {}

    def describe(self, table: str) -> Sequence[str]:
        """Return lines about a table for ``recd plan``."""
        return ()

    # Reports of a run.

    def channels(self, model: nn.Module) -> Mapping[Channel, str]:
        """Return names of collectives whose bytes are counted separately."""
        return {}

    @classmethod
    def observe(cls, parts: Sequence[Self], model: nn.Module, steps: int) -> Any:
        """Return this rank's counts over ``steps`` steps, for all strategies of this class."""
        return None

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        """Return the report sections for all strategies of this class."""
        return ()


class RowUpdate(NamedTuple):
    """Optimizer of a table's rows, which the backward pass applies.

    Attributes:
        optimizer: class of ``torchrec.optim`` or ``torch.optim`` that FBGEMM has a kernel for.
        arguments: arguments of ``apply_optimizer_in_backward``, such as ``lr`` and ``eps``. The
            ``training`` section defines the defaults.
    """

    optimizer: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]


class Optimizer(Plugin, ABC):
    """Selects the optimizer of the tables of its entry."""

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def update(self, table: Table) -> RowUpdate:
        """Return the optimizer of a table's rows. It must be the same on every rank."""


class AccessOptions(PluginOptions):
    """Options of plugins that need access frequencies: a profile file, or rows to count."""

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
        """Return access counts of the rows of ``tables``.

        Args:
            tables: tables of the model.
            context: planning context. Its data is counted if there is no file.
            deduplicated: as in ``TrainingData.access``. Ignored for a file.

        Raises:
            DataError: the data cannot be read, or the file is not an access profile.
        """
        if self.profile is None:
            return context.data.access(tables, self.profile_rows, deduplicated=deduplicated)
        return AccessProfile.load(self.profile)

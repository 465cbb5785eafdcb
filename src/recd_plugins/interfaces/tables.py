"""Table strategies, lookup kernels and optimizers, and the context that tables are planned in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel

from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds
from recd_plugins.interfaces.plugin import Plugin
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
    """Measurements of the data for shardings; each is made once, when asked for.

    Methods raise DataError if the data is missing or wrong.
    """

    @abstractmethod
    def profile(self) -> DataProfile:
        """Return lengths and dedupe factors of the features, as the model gets them."""

    @abstractmethod
    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return how often each row of ``tables`` is read, the same on every rank.

        Args:
            tables: of the model.
            rows: first rows of the training split to read; None for all.
            deduplicated: for tables whose features are deduplicated, count only ids of unique rows
                of batches, as they are sent. False counts all rows.
        """

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:
        """Return the distinct ids of a batch by table name, of tables where they are known."""
        return {}


@dataclass(frozen=True)
class PlanContext:
    """The ranks that a model is sharded for, and their data.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: divides ``world_size``.
        batch_size: rows per rank.
        optimizer: of the tables: ``sgd`` or ``rowwise_adagrad``.
        device_type: of the tables: ``cpu`` or ``cuda``.
        rates: of collectives of these ranks.
        data: that the model is trained on.
        sections: of the topology that packages declare, by name.
        memory_bytes: of a rank, where tables are looked up; None if unknown.
        costs: rates of a step, measured or lower bounds; None if unknown.
        topology: for TorchRec's planner; None for ranks on machines like this one.
        measured: whether ``costs`` were measured, so that predicted steps can be trusted.
        wire_bytes: of a scalar of embeddings and gradients between ranks (``training.wire``).
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    optimizer: str
    device_type: str
    rates: CollectiveRates
    data: TrainingData
    sections: Mapping[str, BaseModel] = field(default_factory=dict)
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
    """Makes lookup kernels for some tables, in place of TorchRec's.

    Attributes:
        compute_kernel: TorchRec's name of the kernel in plans of these tables.
    """

    compute_kernel: str

    @property
    @abstractmethod
    def tables(self) -> Collection[str]:
        """Names of the tables; may include tables of other modules."""

    @abstractmethod
    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> nn.Module:
        """Return the kernel of a group of these tables with pooling, with TorchRec's arguments."""

    @abstractmethod
    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> nn.Module:
        """Return the kernel of a group without pooling."""

    def as_planned(
        self, params: Mapping[str, ParameterSharding], configs: Iterable[BaseEmbeddingConfig]
    ) -> Self:
        """Return the kernels of one module, given the plan of its tables."""
        return self

    def prefetches(self, table: str) -> bool:
        """Return whether a table's rows are fetched before the batch that needs them."""
        return False


class RowMemory(NamedTuple):
    """Bytes of a shard's rows with their optimizer state.

    Attributes:
        there: where they are looked up.
        on_host: additionally in host memory, for tables that a GPU looks up.
        optimizer: the part of ``there`` that is optimizer state.
    """

    there: int
    on_host: int
    optimizer: int


class StepShape(NamedTuple):
    """Sizes of a step: rows per rank, ranks, ranks per node, data, and bytes of a sent scalar."""

    batch_size: int
    world_size: int
    ranks_per_node: int
    profile: DataProfile
    wire_bytes: float = 4


@dataclass(frozen=True)
class TrainedRun:
    """Counts of a run at its end, the same on every rank.

    Attributes:
        model: sharded, without its DistributedModelParallel.
        plan: of its tables.
        tables: of the model.
        setting: of the parts.
        sent: bytes of all ranks in one step by channel; None for runs that are too short.
        observed: result of ``TableStrategy.observe`` by rank.
    """

    model: nn.Module
    plan: ShardingPlan
    tables: Sequence[Table]
    setting: PlanContext
    sent: Mapping[str, float] | None
    observed: Sequence[Any]


class Section(ABC):
    """A section of the report of ``recd run``.

    Attributes:
        name: key in the JSON report.
    """

    name: ClassVar[str]

    @abstractmethod
    def as_json(self) -> Any:
        """Return JSON values."""

    @abstractmethod
    def shown(self, run: str) -> Sequence[RenderableType]:
        """Return what the terminal shows; ``run`` names the run in a comparison, or is empty."""


class TableStrategy:
    """The effect of one entry of ``sharding:`` or ``cache:`` on its tables.

    Every method is optional. Every process makes it by itself, for a ``PlanContext``.
    """

    #: Whether ``optimizers:`` entries may name its tables: it does not train rows itself, nor
    #: depends on the optimizer of the ``training`` section.
    follows_optimizers: ClassVar[bool] = False

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return the planner's constraints by table; must not contradict the plugin's own."""
        return {}

    @classmethod
    def kernels(cls, parts: Sequence[Self]) -> LookupKernels | None:
        """Return the lookup kernels of all parts of this class; None for TorchRec's."""
        return None

    def needs_stock_kernels(self) -> Mapping[str, str]:
        """Return, by table name, why a table cannot have another entry's kernels.

        The words follow this entry's name.
        """
        return {}

    # Costs of a step, for the planner and `recd plan`.

    def sharded_share(self, table: str) -> float:
        """Return the share of a table's ids that go to its own shards."""
        return 1.0

    def row_memory(
        self, option: ShardingOption, shard: Shard, optimizer: str, device_type: str
    ) -> RowMemory | None:
        """Return the memory of a shard's rows; None if as in TorchRec's kernels."""
        return None

    def fetch_bandwidth(self, table: str) -> float | None:
        """Return the bytes per second at which missing rows are fetched; None: host memory's."""
        return None

    def memory_of_rank(self, ranks_per_node: int, optimizer: str) -> Mapping[str, int]:
        """Return the bytes of each rank beside tables during a backward pass, by what they are.

        Bytes of the same name are added up over parts.
        """
        return {}

    def activation_bytes(self, table: Table, ids: float) -> float:
        """Return the bytes that a rank's forward pass keeps for ``ids`` ids beside lookups."""
        return 0.0

    def work(
        self, table: Table, sharding: ParameterSharding, step: StepShape
    ) -> Iterable[tuple[slice, StepCost]]:
        """Return costs of a table beside sharded lookups, each with its slice of ranks."""
        return ()

    def collectives(self, tables: Collection[str]) -> int:
        """Return the additional collectives per step of a module with these tables."""
        return 0

    def figures(self, table: str) -> Mapping[str, Any]:
        """Return JSON values of a table for ``recd plan --json``, by name."""
        return {}

    def words(self, table: str) -> Sequence[str]:
        """Return lines on a table for ``recd plan``, below the shards of all tables."""
        return ()

    # Reports of a run.

    def channels(self, model: nn.Module) -> Mapping[Channel, str]:
        """Return names of the collectives of a sharded model whose bytes are counted separately."""
        return {}

    @classmethod
    def observe(cls, parts: Sequence[Self], model: nn.Module, steps: int) -> Any:
        """Return counts of this rank over ``steps`` steps, pickled to the others.

        Called for all parts of this class together, after training and before evaluation.
        """
        return None

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        """Return the sections of ``recd run`` for all parts of this class together."""
        return ()


class RowUpdate(NamedTuple):
    """The update of a table's rows in the backward pass.

    Attributes:
        optimizer: a class of ``torchrec.optim`` or ``torch.optim`` that FBGEMM has a kernel of.
        arguments: for ``apply_optimizer_in_backward``: ``lr``, ``eps``, and others of FBGEMM's
            kernels. The ``training`` section has the defaults.
    """

    optimizer: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]


class Optimizer(Plugin, ABC):
    """Trains the tables of its entry; the ``training`` section's optimizer trains the others.

    The planner splits columns by itself only for optimizer classes that train a part of a row as in
    the whole row.
    """

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def update(self, table: Table) -> RowUpdate:
        """Return the update of ``table``'s rows; every rank must get the same by itself."""

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
    """What a sharding may ask of the data; measured where it is asked for, once."""

    @abstractmethod
    def profile(self) -> DataProfile:
        """Lengths and dedupe factors of the features, as the model is fed them.

        Raises:
            DataError: the data is missing or wrong.
        """

    @abstractmethod
    def access(
        self, tables: Sequence[Table], rows: int | None, *, deduplicated: bool = True
    ) -> AccessProfile:
        """How often each row of ``tables`` is read, the same on every rank.

        Args:
            tables: of the model.
            rows: the first so many of the training split; None takes all of them.
            deduplicated: count only what is sent of a table whose features the converter
                deduplicates: the ids of the unique rows of batches, whose dedupe factor then stands
                with the counts. False counts all rows of data.

        Raises:
            DataError: the data is missing or wrong.
        """

    def distinct(self, tables: Sequence[Table]) -> Mapping[str, DistinctIds]:  # noqa: ARG002
        """The distinct ids that a batch has of ``tables``, by table name; none that are not known.

        Raises:
            DataError: the data is missing or wrong.
        """
        return {}


@dataclass(frozen=True)
class PlanContext:
    """The ranks that a model is sharded for, and the data that they read.

    Attributes:
        world_size: ranks.
        ranks_per_node: of them in a node; divides ``world_size``.
        batch_size: rows of a rank.
        optimizer: of the tables: ``sgd`` or ``rowwise_adagrad``.
        device_type: of the tables: ``cpu`` or ``cuda``.
        rates: how fast collectives of these ranks are.
        data: what the model is trained on.
        sections: of the topology, which packages of plugins declare, by name.
        memory_bytes: of a rank, where tables are looked up; None where it is not known.
        costs: seconds of what a step does, measured or else the least they can be; None where
            nothing is known of the machines.
        topology: the ranks as TorchRec's planner takes them; None for those of machines like this.
        measured: whether ``costs`` were, so that a step that they predict can be believed.
        wire_bytes: of a scalar of embeddings and their gradients between ranks (``training.wire``).
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
        """Nodes."""
        return self.world_size // self.ranks_per_node


class LookupKernels(ABC):
    """Makes the kernels that look some tables up, in place of TorchRec's.

    Attributes:
        compute_kernel: TorchRec's name of the kernel that a plan gives these tables.
    """

    compute_kernel: str

    @property
    @abstractmethod
    def tables(self) -> Collection[str]:
        """Names of the tables. Those of other modules do no harm."""

    @abstractmethod
    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> nn.Module:
        """The kernel of a group of these tables, with pooling, as TorchRec would construct it."""

    @abstractmethod
    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> nn.Module:
        """The same without pooling."""

    def as_planned(
        self,
        params: Mapping[str, ParameterSharding],  # noqa: ARG002
        configs: Iterable[BaseEmbeddingConfig],  # noqa: ARG002
    ) -> Self:
        """The same for one module, with what the plan decided of its tables."""
        return self

    def prefetches(self, table: str) -> bool:  # noqa: ARG002
        """Whether a table wants its rows fetched before the batch that needs them is computed."""
        return False


class RowMemory(NamedTuple):
    """Bytes that the rows of a shard take, with their optimizer state.

    Attributes:
        there: where they are looked up.
        on_host: in host memory besides, of tables that a GPU looks up.
        optimizer: of ``there``, those of optimizer state.
    """

    there: int
    on_host: int
    optimizer: int


class StepShape(NamedTuple):
    """A step of all ranks: rows of a rank, ranks, ranks of a node, and what the rows look up.

    Of embeddings and gradients between ranks a scalar takes ``wire_bytes`` (``training.wire``).
    """

    batch_size: int
    world_size: int
    ranks_per_node: int
    profile: DataProfile
    wire_bytes: float = 4


@dataclass(frozen=True)
class TrainedRun:
    """A run at its end, as its ranks have counted it: the same on every rank.

    Attributes:
        model: sharded, without what DistributedModelParallel wraps it in.
        plan: of its tables.
        tables: of the model.
        setting: that the parts were made for.
        sent: bytes of all ranks in one step by channel; None of a run too short to tell.
        observed: what ``TableStrategy.observe`` returned, by rank.
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
        """JSON values."""

    @abstractmethod
    def shown(self, run: str) -> Sequence[RenderableType]:
        """What the terminal shows, below each other; ``run`` tells runs apart, and may be empty."""


class TableStrategy:
    """What one entry of ``sharding:`` or ``cache:`` does to the tables that it claims.

    One that overrides nothing does nothing. Every process makes it by itself, for a
    ``PlanContext``.
    """

    #: Whether entries of ``optimizers:`` may name its tables: it neither trains rows itself nor
    #: counts on the optimizer of the ``training`` section.
    follows_optimizers: ClassVar[bool] = False

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """What the planner may do with each table; merged with the plugin's own constraints.

        Two values of one field are refused.
        """
        return {}

    def ranks(self, table: str) -> Collection[int] | None:  # noqa: ARG002
        """The ranks that may hold rows of a table, which is not split over all; None: any."""
        return None

    def together(self) -> Collection[Collection[str]]:
        """Groups of tables by name, each of which stays whole on one rank with the others."""
        return ()

    @classmethod
    def kernels(cls, parts: Sequence[Self]) -> LookupKernels | None:  # noqa: ARG003
        """Lookup kernels of all parts of this class together; None where TorchRec's are theirs."""
        return None

    def needs_stock_kernels(self) -> Mapping[str, str]:
        """Why a table cannot have another entry's kernels, in words that follow this entry's name.

        By table name; tables that can are left out.
        """
        return {}

    # What a step takes, for the planner and `recd plan`.

    def sharded_share(self, table: str) -> float:  # noqa: ARG002
        """The share of a table's ids that go to its own shards."""
        return 1.0

    def row_memory(
        self,
        option: ShardingOption,  # noqa: ARG002
        shard: Shard,  # noqa: ARG002
        optimizer: str,  # noqa: ARG002
        device_type: str,  # noqa: ARG002
    ) -> RowMemory | None:
        """What the rows of a shard take; None where that is as in TorchRec's kernels."""
        return None

    def fetch_bandwidth(self, table: str) -> float | None:  # noqa: ARG002
        """Bytes a second at which missing rows are fetched; None: as host memory has it."""
        return None

    def memory_of_rank(self, ranks_per_node: int, optimizer: str) -> Mapping[str, int]:  # noqa: ARG002
        """Bytes that each rank holds beside tables, while a backward pass runs, by what they are.

        The same name of several parts is added up.
        """
        return {}

    def activation_bytes(self, table: Table, ids: float) -> float:  # noqa: ARG002
        """Bytes that a forward pass of a rank keeps for ``ids`` ids beside its sharded lookups."""
        return 0.0

    def work(
        self,
        table: Table,  # noqa: ARG002
        sharding: ParameterSharding,  # noqa: ARG002
        step: StepShape,  # noqa: ARG002
    ) -> Iterable[tuple[slice, StepCost]]:
        """What a step of ranks does for a table beside its sharded lookups: ranks, and each's."""
        return ()

    def collectives(self, tables: Collection[str]) -> int:  # noqa: ARG002
        """Collectives of a step that a module with these tables has besides."""
        return 0

    def figures(self, table: str) -> Mapping[str, Any]:  # noqa: ARG002
        """JSON values of a table in ``recd plan --json``, by name."""
        return {}

    def words(self, table: str) -> Sequence[str]:  # noqa: ARG002
        """Lines that ``recd plan`` shows of a table, below the shards of all."""
        return ()

    # What a run shows.

    def channels(self, model: nn.Module) -> Mapping[Channel, str]:  # noqa: ARG002
        """Names of collectives whose bytes are to be counted apart, of a sharded model."""
        return {}

    @classmethod
    def observe(cls, parts: Sequence[Self], model: nn.Module, steps: int) -> Any:  # noqa: ARG003
        """What this rank counted in ``steps`` steps of training; travels to the others by pickle.

        Of all parts of this class together, when training ends, before evaluation.
        """
        return None

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:  # noqa: ARG003
        """What ``recd run`` reports of all parts of this class together."""
        return ()


class RowUpdate(NamedTuple):
    """The update of a table's rows in the backward pass, in the terms of TorchRec.

    Attributes:
        optimizer: a class that FBGEMM has a kernel of, of ``torchrec.optim`` or ``torch.optim``.
        arguments: of it, as ``apply_optimizer_in_backward`` takes them: ``lr``, ``eps``, and others
            that FBGEMM's kernels take. What is left out is as the ``training`` section says.
    """

    optimizer: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]


class Optimizer(Plugin, ABC):
    """Trains the tables that its registry entry names; the others go by the ``training`` section.

    The planner knows of each class whether it trains parts of a row as it trains whole rows, and
    splits columns of its own accord only where it does.
    """

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def update(self, table: Table) -> RowUpdate:
        """How the rows of ``table`` are updated.

        Every rank calls it by itself and must come to the same.
        """

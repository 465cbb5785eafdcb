"""What an entry of the registry does to the tables that it claims, from plan to report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption
    from torchrec.distributed.types import ParameterSharding, ShardingPlan

    from recd_plugins.interfaces.lookup_kernels import LookupKernels
    from recd_plugins.interfaces.setting import PlanContext
    from recd_plugins.values.channels import Channel
    from recd_plugins.values.data_profile import DataProfile
    from recd_plugins.values.rows import Table
    from recd_plugins.values.step_cost import StepCost


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

"""Kind ``sharding``: where the rows of a table live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder

    from recd_plugins.access.profile import AccessProfile
    from recd_plugins.planning.collective_rates import CollectiveRates, TierMemory
    from recd_plugins.planning.profile import DataProfile
    from recd_plugins.planning.tiers.cluster import Cluster
    from recd_plugins.planning.tiers.plan import TierPlan


@dataclass(frozen=True)
class Table:
    """An embedding table of the model.

    Attributes:
        name: TorchRec's table name.
        features: the features that look it up.
        num_embeddings: rows.
        embedding_dim: scalars a row.
        pooled: True in an EmbeddingBagCollection, False in an EmbeddingCollection.
    """

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooled: bool


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


@dataclass(frozen=True)
class Setting:
    """The ranks that a model is sharded for, and the data that they read.

    Attributes:
        world_size: ranks.
        ranks_per_node: of them in a node; divides ``world_size``.
        batch_size: rows of a rank.
        optimizer: of the tables: ``sgd`` or ``rowwise_adagrad``.
        device_type: of the tables: ``cpu`` or ``cuda``.
        rates: how fast collectives of these ranks are.
        data: what the model is trained on.
        memory: what replicated rows take there, where it was measured.
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    optimizer: str
    device_type: str
    rates: CollectiveRates
    data: TrainingData
    memory: TierMemory | None = None

    @property
    def nodes(self) -> int:
        """Nodes."""
        return self.world_size // self.ranks_per_node

    @property
    def cluster(self) -> Cluster:
        """The ranks, as the cost model of tiers takes them."""
        from recd_plugins.planning.tiers.cluster import Cluster

        return Cluster(self.nodes, self.ranks_per_node, self.batch_size, self.rates.collectives())


class Sharding(Plugin, ABC):
    """Decides the sharding of the tables that its registry entry names.

    Overriding nothing leaves the tables to the planner.
    """

    kind: ClassVar[str] = "sharding"

    #: Whether each rank holds these tables whole. Their features then travel without
    #: deduplication, in an EmbeddingBagCollection of their own: TorchRec's data-parallel kernels
    #: do not take variable batches.
    replicates: ClassVar[bool] = False

    def rewrite(
        self,
        model: nn.Module,
        tables: Sequence[Table],  # noqa: ARG002
        setting: Setting,  # noqa: ARG002
    ) -> nn.Module:
        """Replace modules of ``model`` before planning; returns the model.

        Every rank calls it by itself and must come to the same.
        """
        return model

    def tiers(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: Setting,  # noqa: ARG002
    ) -> TierPlan | None:
        """Which rows of ``tables`` live where, of a plugin that has tiers of rows; else None."""
        return None

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """The planner's constraints by table name."""
        return {}

    def sharders(
        self,
        fused_params: dict[str, Any],  # noqa: ARG002
    ) -> Sequence[ModuleSharder[nn.Module]]:
        """Sharders for module types that ``rewrite`` put in; the built-in ones stay."""
        return ()

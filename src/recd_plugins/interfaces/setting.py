"""What a sharding decides by: the ranks, and the data that they train on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel

from recd_plugins.access.profile import AccessProfile
from recd_plugins.values.collective_rates import CollectiveRates
from recd_plugins.values.data_profile import DataProfile, DistinctIds
from recd_plugins.values.rows import Table
from recd_plugins.values.stage_costs import StageCosts

if TYPE_CHECKING:
    from torchrec.distributed.planner import Topology


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

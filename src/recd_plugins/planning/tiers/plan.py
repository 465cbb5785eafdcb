"""Which rows of which tables go into which tier, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugins.planning.tiers.cluster import Cluster
from recd_plugins.planning.tiers.costs import CostOptions
from recd_plugins.planning.tiers.demand import TableDemand

Strategy = Literal["row_wise", "data_parallel", "two_tier", "three_tier", "joint"]


@dataclass(frozen=True)
class TableTiers:
    """The tiers of a table: its ``hot`` most accessed rows, then ``flex`` rows, the rest cold.

    Shares are of the table's accesses; with no access at all they are 0, 0 and 1.
    """

    demand: TableDemand
    hot: int
    flex: int
    hot_share: float
    flex_share: float

    @property
    def name(self) -> str:
        return self.demand.name

    @property
    def cold(self) -> int:
        return self.demand.num_embeddings - self.hot - self.flex

    @property
    def cold_share(self) -> float:
        return 1.0 - self.hot_share - self.flex_share

    @property
    def hot_rows(self) -> NDArray[np.int64]:
        """The data-parallel rows, most accessed first."""
        return self.demand.ids(0, self.hot)

    @property
    def flex_rows(self) -> NDArray[np.int64]:
        """The rows of the flex tier, most accessed first."""
        return self.demand.ids(self.hot, self.hot + self.flex)


@dataclass(frozen=True)
class CollectiveSeconds:
    """Seconds of each collective in a step, forward and backward (FlexShard, table 6)."""

    a2a_global: float
    a2a_intra: float
    ar_global: float
    ar_cross: float

    def exposed(self, overlap: float = 0.0) -> float:
        """Seconds of all, with a share of all but the global all-to-all hidden."""
        return self.a2a_global + (1 - overlap) * (self.a2a_intra + self.ar_global + self.ar_cross)


@dataclass(frozen=True)
class TierPlan:
    """Tiers of tables, with what the cost model says of them.

    ``memory_bytes`` are those of these tables and their activations on a rank, ``row_wise_...`` the
    same of plain row-wise sharding, without deduplication and coalescing but with the same dtypes.
    """

    tables: tuple[TableTiers, ...]
    cluster: Cluster
    options: CostOptions
    strategy: Strategy
    a2a_reduction: float  # share of plain row-wise sharding's bytes in the global all-to-all saved
    memory_bytes: float
    row_wise_memory_bytes: float
    seconds: CollectiveSeconds
    row_wise_seconds: CollectiveSeconds


def plan_tiers(
    tables: Sequence[TableDemand],
    cluster: Cluster,
    strategy: Strategy,
    options: CostOptions | None = None,
) -> TierPlan:
    """Choose the tiers of ``tables`` together (FlexShard, arXiv 2301.02959, sections 4 and 5).

    Raises ``SetupError`` where a flex tier is asked for on one node, and where memory that the
    options allow cannot be kept.
    """
    raise NotImplementedError

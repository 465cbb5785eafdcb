"""The ranks of a cluster, and how long their collectives take."""

from __future__ import annotations

from dataclasses import dataclass

from recd_plugins.api import SetupError


@dataclass(frozen=True)
class Collective:
    """What a collective takes: ``seconds`` however little is sent, and then so many bytes a second.

    Bytes are the elements that a rank puts in times their size, those for itself too. Those of an
    all-to-all of embeddings count twice, forward and backward; those of an all-reduce once.
    """

    bytes_per_second: float
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not self.seconds >= 0:
            raise SetupError(
                f"a collective has a bandwidth above 0 and a latency of at least 0, not {self}"
            )

    def seconds_for(self, num_bytes: float) -> float:
        """Seconds for ``num_bytes``; 0 for none, as the collective is then left out."""
        return self.seconds + num_bytes / self.bytes_per_second if num_bytes > 0 else 0.0


@dataclass(frozen=True)
class Collectives:
    """The four collectives that tiers take.

    Embeddings travel in all-to-alls between all ranks (``a2a_global``: the row-wise tier) and
    inside a node (``a2a_intra``: the flex tier); gradients in all-reduces over all ranks
    (``ar_global``: the data-parallel tier) and over the ranks of one place in each node
    (``ar_cross``: the flex tier).
    """

    a2a_global: Collective
    a2a_intra: Collective
    ar_global: Collective
    ar_cross: Collective


#: Bandwidths with which table 6 of FlexShard (arXiv 2301.02959) is consistent: 4 nodes of 8
#: A100-40GB, NVLink 3 and 200 Gb/s RoCE a GPU.
PAPER_FLAT = Collectives(
    a2a_global=Collective(24.2e9),
    a2a_intra=Collective(77.8e9),
    ar_global=Collective(118e9),
    ar_cross=Collective(10.9e9),
)
#: The same with latencies, which fit the table better.
PAPER = Collectives(
    a2a_global=Collective(25.6e9, 7.5e-3),
    a2a_intra=Collective(84e9, 1.5e-3),
    ar_global=Collective(214e9, 2.35e-3),
    ar_cross=Collective(12.0e9, 1.8e-3),
)


@dataclass(frozen=True)
class ClusterShape:
    """``nodes`` of ``ranks_per_node`` ranks, each with ``batch_size`` samples a step."""

    nodes: int
    ranks_per_node: int
    batch_size: int
    collectives: Collectives = PAPER

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node, self.batch_size) < 1:
            raise SetupError(
                f"a cluster has at least 1 node, 1 rank a node and 1 sample a batch, not "
                f"{self.nodes}, {self.ranks_per_node} and {self.batch_size}"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


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

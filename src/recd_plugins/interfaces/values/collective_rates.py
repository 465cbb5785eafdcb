"""What collectives reach on a topology: what was measured there, or what its links allow."""

from __future__ import annotations

from typing import Annotated, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_BETWEEN_NODES = ("a2a_global", "ar_global", "ar_cross")


class CollectiveRate(BaseModel):
    """Seconds of one collective: a latency, and bytes over a bandwidth.

    Bytes are those of FlexShard's cost model (arXiv 2301.02959): of an all-to-all all that a rank
    puts in, its own share too; of an all-reduce the tensor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes_per_second: _Rate = Field(description="Of one rank.")
    seconds: _Seconds = Field(default=0.0, description="However few the bytes are.")


class Links(Protocol):
    """Ranks and what links them, as a topology says: bandwidths are bytes a second, one way."""

    ranks_per_node: int
    nodes: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float


class CollectiveRates(BaseModel):
    """The section ``collectives`` of a topology."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a2a_global: CollectiveRate = Field(description="All-to-all of all ranks.")
    a2a_intra: CollectiveRate = Field(description="All-to-all of the ranks of a node.")
    ar_global: CollectiveRate = Field(description="All-reduce of all ranks.")
    ar_cross: CollectiveRate = Field(
        description="All-reduce of ranks with the same place in their nodes, all at once."
    )

    @classmethod
    def of_topology(cls, topology: Links) -> Self:
        """Bounds: the busiest link decides, nothing has a latency, and no rank waits.

        Of what a rank of U = N x W ranks puts into an all-to-all, (U - W) / U go through its
        network and (W - 1) / U through its node. All-reduces move 2 (n - 1) / n of the tensor; one
        of all ranks reduces in the node, then a W-th of the tensor across nodes. A group of one
        rank counts as if its link carried everything once.
        """
        ranks, nodes = topology.ranks_per_node, topology.nodes
        world = ranks * nodes
        intra, inter = topology.intra_node_bandwidth, topology.inter_node_bandwidth

        def rate(in_node: float, across: float) -> CollectiveRate:
            """The rate where for a byte put in so many are sent through either link."""
            seconds = max(in_node / intra, across / inter)
            return CollectiveRate(bytes_per_second=1 / (seconds or 1 / intra))

        return cls(
            a2a_global=rate((ranks - 1) / world, (world - ranks) / world),
            a2a_intra=rate((ranks - 1) / ranks, 0),
            ar_global=rate(2 * (ranks - 1) / ranks, 2 * (nodes - 1) / world),
            ar_cross=rate(0, 2 * (nodes - 1) / nodes or 1),
        )

    def within(self, bounds: CollectiveRates) -> Self:
        """The same, with none between nodes faster than its bound.

        Links that are limited let some bytes through at once, and few rounds may see those alone.
        """

        def least(name: str) -> CollectiveRate:
            rate, bound = getattr(self, name), getattr(bounds, name)
            fastest = min(rate.bytes_per_second, bound.bytes_per_second)
            return CollectiveRate(bytes_per_second=fastest, seconds=rate.seconds)

        return self.model_copy(update={name: least(name) for name in _BETWEEN_NODES})

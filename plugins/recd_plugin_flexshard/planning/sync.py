"""What summing the gradients of copies takes: of all rows, or of those that were touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.cluster import ClusterShape, Collective

#: ``dense``: an all-reduce of all copies; ``sparse``: an exchange of those that some rank touched.
Sync = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Syncs:
    """How gradients of the copies of each tier are summed."""

    hot: Sync = "dense"
    flex: Sync = "dense"

    @property
    def sparse(self) -> tuple[Literal["hot", "flex"], ...]:
        """The tiers whose sync is."""
        tiers: tuple[Literal["hot", "flex"], ...] = ("hot", "flex")
        return tuple(tier for tier in tiers if getattr(self, tier) == "sparse")


#: What the paper has.
DENSE = Syncs()


def log_missed(sent: NDArray[np.float64], coalesce: bool) -> NDArray[np.float64]:
    """The logarithm of the share of batches that have none of rows with ``w``: ``exp(-w)``, and
    coalesced ``1 - w``."""
    if not coalesce:
        return -sent
    with np.errstate(divide="ignore"):
        missed: NDArray[np.float64] = np.log1p(-np.minimum(sent, 1.0))
    return missed


@dataclass(frozen=True)
class CopyGroup:
    """``members`` ranks that hold copies of the same rows, each for the batches of ``batches``.

    ``repeats``: accesses of a row that come together, in one batch or none; 1: they are
    independent.
    """

    members: int
    batches: int
    repeats: float = 1.0

    @classmethod
    def hot(cls, cluster: ClusterShape) -> CopyGroup:
        """All ranks, each for its own batch."""
        return cls(cluster.world_size, 1)

    @classmethod
    def flex(cls, cluster: ClusterShape) -> CopyGroup:
        """A rank of each node, for the batches of all of the node."""
        return cls(cluster.nodes, cluster.ranks_per_node)

    def exchanged(self, sent: NDArray[np.float64], coalesce: bool) -> NDArray[np.float64]:
        """Of rows with ``w`` (``costs.rows_sent``), what a sparse sync sends, over what a dense one
        does: 0 to 1.

        Of n ranks a dense one sends ``2 (n - 1) / n`` gradients of a row. A sparse one sends
        ``t + (n - 2) / n * u``: t is the share of batches in which a rank touches the row,
        ``1 - q ** batches``, and u that in which any rank does, ``1 - q ** (batches * n)``. A batch
        of one rank misses the row with q, see ``log_missed``.
        """
        if self.members == 1:
            return np.zeros_like(sent)
        missed = log_missed(sent, coalesce) / self.repeats
        touched, union = (-np.expm1(self.batches * ranks * missed) for ranks in (1, self.members))
        n = self.members
        share: NDArray[np.float64] = (n * touched + (n - 2) * union) / (2 * (n - 1))
        return share

    @property
    def sent_of_reduced(self) -> float:
        """Bytes that a rank sends for a byte of a tensor that is reduced."""
        return 2 * (self.members - 1) / self.members

    def bits(self, rows: float) -> float:
        """Bytes that a rank sends to tell the others which of ``rows`` it touches."""
        return (self.members - 1) * rows / 8

    def sent_sparsely(self, rows: float, exchanged: float) -> float:
        """Bytes that a rank sends for ``rows``, ``exchanged`` being bytes of gradients."""
        return self.sent_of_reduced * exchanged + self.bits(rows)

    def calls(self, sync: Sync) -> int:
        """Collectives of a sparse sync: bits, gradients and sums; of two ranks each makes all."""
        if sync == "dense" or self.members == 1:
            return 0
        return 2 if self.members == 2 else 3


@dataclass(frozen=True)
class Copies:
    """The copies of a tier on a rank.

    ``reduced``: bytes of all of their gradients. ``exchanged``: of these, what an all-reduce has
    that sends as much as a sparse sync of them, bits apart.
    """

    group: CopyGroup
    collective: Collective
    rows: float
    reduced: float
    exchanged: float

    def sent(self, sync: Sync) -> float:
        """Bytes that a rank sends, the mean over ranks."""
        if sync == "dense":
            return self.group.sent_of_reduced * self.reduced
        return self.group.sent_sparsely(self.rows, self.exchanged)

    def seconds(self, sync: Sync) -> float:
        """What the sum takes where it sends as fast as an all-reduce of these ranks."""
        calls = self.group.calls(sync)
        if not calls or not self.rows:
            return self.collective.seconds_for(self.reduced)
        num_bytes = self.sent(sync) / self.group.sent_of_reduced
        return (calls - 1) * self.collective.seconds + self.collective.seconds_for(num_bytes)

    def cheapest(self, minimise: Literal["time", "bytes"]) -> Sync:
        """Of the two syncs; of equals the dense one."""
        cost = self.sent if minimise == "bytes" else self.seconds
        return "sparse" if cost("sparse") < cost("dense") else "dense"

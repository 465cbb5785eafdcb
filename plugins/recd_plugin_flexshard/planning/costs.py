"""Cost model of a row in each tier (FlexShard, arXiv 2301.02959, sections 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from recd_plugins.api import TableAccess, data_profiles


#: Bytes of a weight, of its gradient in an all-reduce, and of an activation in memory.
SCALAR_BYTES = 4

Floats = NDArray[np.float64]
#: ``dense``: all-reduce the gradients of all copies. ``sparse``: exchange those of touched rows.
Sync = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Collective:
    """Latency in seconds and bandwidth of a collective.

    Bytes are the input tensor of one rank, including the part that stays on the rank. For an
    all-to-all of embeddings they include the forward and the backward pass.
    """

    bytes_per_second: float
    seconds: float = 0.0

    def seconds_for(self, num_bytes: float) -> float:
        """Return the seconds for ``num_bytes``; 0 without bytes."""
        return self.seconds + num_bytes / self.bytes_per_second if num_bytes > 0 else 0.0


@dataclass(frozen=True)
class Collectives:
    """Speed of the four collectives that tiers use.

    - ``a2a_global``: embeddings of cold rows, between all ranks.
    - ``a2a_intra``: embeddings of flex rows, inside a node.
    - ``ar_global``: gradients of hot rows, over all ranks.
    - ``ar_cross``: gradients of flex rows, over one rank of each node.
    """

    a2a_global: Collective
    a2a_intra: Collective
    ar_global: Collective
    ar_cross: Collective


#: Bandwidths consistent with FlexShard's table 6: 4 nodes of 8 A100-40GB, NVLink 3, 200 Gb/s RoCE.
PAPER_FLAT = Collectives(
    a2a_global=Collective(24.2e9),
    a2a_intra=Collective(77.8e9),
    ar_global=Collective(118e9),
    ar_cross=Collective(10.9e9),
)
#: The same with latencies, which fits the table better.
PAPER = Collectives(
    a2a_global=Collective(25.6e9, 7.5e-3),
    a2a_intra=Collective(84e9, 1.5e-3),
    ar_global=Collective(214e9, 2.35e-3),
    ar_cross=Collective(12.0e9, 1.8e-3),
)


@dataclass(frozen=True)
class ClusterShape:
    """Number of nodes, ranks per node, and samples per rank and step (``batch_size``)."""

    nodes: int
    ranks_per_node: int
    batch_size: int
    collectives: Collectives = PAPER

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
        """Return the seconds that compute does not hide.

        The fraction ``overlap`` of all collectives except the global all-to-all is hidden.
        """
        return self.a2a_global + (1 - overlap) * (self.a2a_intra + self.ar_global + self.ar_cross)


@dataclass(frozen=True)
class CostOptions:
    """Parameters of the cost model, and the goal and budget of a plan.

    Attributes:
        memory_multiplier: M, memory of a copied row divided by the memory of its weights. 6 fits
            FlexShard's table 5: the row itself, twice as much for the optimizer and three times for
            DDP.
        saved_activations: c, number of embeddings that a rank saves in memory for each access to a
            hot row.
        wire_bytes: bytes per scalar in all-to-alls and in the sparse sync.
        coalesce: whether a row that a batch accesses several times is sent once.
        overlap: fraction of communication time that compute hides, for all collectives except the
            global all-to-all.
        minimise: ``time``: a row gets a copy only if that saves time. ``bytes``: as many copies as
            memory allows, for the fewest bytes in the global all-to-all.
        sync: how gradients of copies are summed; ``auto`` picks the cheaper one for each tier.
        memory_ratio: budget as a multiple of the memory of plain row-wise sharding.
        memory_bytes: budget in bytes per rank, instead of ``memory_ratio``.
    """

    memory_multiplier: float = 6.0
    saved_activations: float = 1.0
    wire_bytes: float = 4.0
    coalesce: bool = False
    overlap: float = 0.0
    minimise: Literal["time", "bytes"] = "time"
    sync: Literal["auto", "dense", "sparse"] = "dense"
    memory_ratio: float = 1.0
    memory_bytes: float | None = None

    @property
    def plain(self) -> CostOptions:
        """Return these options without coalescing."""
        return replace(self, coalesce=False)

    @property
    def row_wise_bytes(self) -> float:
        """Return the bytes per scalar in the global all-to-all, forward and backward."""
        return 2 * self.wire_bytes

    @property
    def flex_bytes(self) -> float:
        """Return the bytes per scalar in the all-to-all within a node, forward and backward."""
        return 2 * self.wire_bytes

    @property
    def exposed(self) -> float:
        """Return the weight of communication times, except for the global all-to-all.

        Never 0, so that equal plans are compared by these times.
        """
        return max(1e-9, 0.0 if self.minimise == "bytes" else 1.0 - self.overlap)

    def activation_bytes(self, lookups: float, sent: float) -> float:
        """Return the bytes of embeddings in memory on the sending and the receiving rank.

        ``lookups`` and ``sent`` are the scalars that a batch looks up and sends.
        """
        return SCALAR_BYTES * (2 * sent + (lookups if self.coalesce else 0.0))


def log_unread(probabilities: Floats) -> Floats:
    """Return the log of the probability that a sample does not access a row."""
    with np.errstate(divide="ignore"):
        return np.log1p(-np.minimum(probabilities, 1.0))


def rows_sent(
    probabilities: Floats, batch_size: float, dedupe_factor: float = 1.0, coalesce: bool = False
) -> Floats:
    """Return ``w``, the mean number of times that a batch of one rank sends each row.

    ``B p`` with ``B = batch_size / dedupe_factor``; ``1 - (1 - p) ** B`` with coalescing.
    """
    batch = batch_size / dedupe_factor
    if not coalesce:
        return probabilities * batch
    return -np.expm1(log_unread(probabilities) * batch)


@dataclass(frozen=True)
class RowCosts:
    """Memory in bytes and time in seconds per scalar of a row, by tier.

    For a row that is sent ``w`` times:

    - cold: ``row_wise_static`` bytes, ``w * a2a_global`` seconds.
    - flex: ``flex_static`` bytes, ``w * a2a_intra + ar_cross`` seconds.
    - hot: ``hot_static - w * saved`` bytes, ``ar_global`` seconds.
    """

    row_wise_static: float
    flex_static: float
    hot_static: float
    saved: float
    a2a_global: float
    a2a_intra: float
    ar_global: float
    ar_cross: float

    @classmethod
    def of(cls, cluster: ClusterShape, options: CostOptions) -> RowCosts:
        node, copy = cluster.ranks_per_node, SCALAR_BYTES * options.memory_multiplier
        by, exposed = cluster.collectives, options.exposed
        return cls(
            row_wise_static=SCALAR_BYTES / cluster.world_size,
            flex_static=copy / node,
            hot_static=copy,
            # With coalescing, a row's two embeddings add to the one of each id.
            saved=SCALAR_BYTES * options.saved_activations * (2 if options.coalesce else 1),
            a2a_global=options.row_wise_bytes / by.a2a_global.bytes_per_second,
            a2a_intra=exposed * options.flex_bytes / by.a2a_intra.bytes_per_second,
            ar_global=exposed * SCALAR_BYTES / by.ar_global.bytes_per_second,
            ar_cross=exposed * SCALAR_BYTES / node / by.ar_cross.bytes_per_second,
        )


@dataclass(frozen=True)
class Syncs:
    """How gradients of hot copies and of flex copies are summed: ``dense`` or ``sparse``."""

    hot: Sync = "dense"
    flex: Sync = "dense"

    @property
    def sparse(self) -> tuple[Literal["hot", "flex"], ...]:
        """Return the tiers with a sparse sync."""
        tiers: tuple[Literal["hot", "flex"], ...] = ("hot", "flex")
        return tuple(tier for tier in tiers if getattr(self, tier) == "sparse")


DENSE = Syncs()


@dataclass(frozen=True)
class CopyGroup:
    """A group of ranks that hold copies of the same rows and sum the gradients of these copies.

    Attributes:
        members: number of ranks in the group.
        batches: number of batches per step whose gradients each member holds.
        repeats: how often a batch accesses a row that it accesses at all.
    """

    members: int
    batches: int
    repeats: float = 1.0

    @classmethod
    def hot(cls, cluster: ClusterShape) -> CopyGroup:
        return cls(cluster.world_size, 1)

    @classmethod
    def flex(cls, cluster: ClusterShape) -> CopyGroup:
        return cls(cluster.nodes, cluster.ranks_per_node)

    @property
    def sent_of_reduced(self) -> float:
        """Return the bytes that a rank sends in an all-reduce, per byte of the tensor."""
        return 2 * (self.members - 1) / self.members

    def exchanged(self, sent: Floats, coalesce: bool) -> Floats:
        """Return the bytes of a sparse sync divided by the bytes of a dense sync, for each row.

        ``sent`` is ``w`` of each row. A sparse sync over n ranks sends ``t + (n - 2) / n * u``
        gradients per row. A rank accesses the row in a fraction ``t = 1 - q ** batches`` of the
        steps, at least one rank in ``u = 1 - q ** (batches * n)``. A batch does not access the row
        with probability ``q = exp(-w / repeats)``, or ``1 - w`` with coalescing.
        """
        if self.members == 1:
            return np.zeros_like(sent)
        missed = (log_unread(sent) if coalesce else -sent) / self.repeats
        touched, union = (-np.expm1(self.batches * ranks * missed) for ranks in (1, self.members))
        n = self.members
        return (n * touched + (n - 2) * union) / (2 * (n - 1))

    def bits(self, rows: float) -> float:
        """Return the bytes of the bitmaps that mark which of ``rows`` rows a rank accessed."""
        return (self.members - 1) * rows / 8

    def sent_sparsely(self, rows: float, exchanged: float) -> float:
        """Return the bytes that a rank sends in a sparse sync of ``rows`` rows.

        ``exchanged`` are the gradient bytes that a dense all-reduce of equal traffic would sum.
        """
        return self.sent_of_reduced * exchanged + self.bits(rows)

    def calls(self, sync: Sync) -> int:
        """Return the number of collectives of a sparse sync; 0 for a dense sync.

        They send bitmaps, gradients and, with 3 or more ranks, sums.
        """
        if sync == "dense" or self.members == 1:
            return 0
        return 2 if self.members == 2 else 3


@dataclass(frozen=True)
class Copies:
    """The copies of one tier on a rank, and the cost to sum their gradients.

    Attributes:
        group: ranks that hold the same copies.
        collective: speed of the all-reduce.
        rows: number of copies on a rank.
        reduced: bytes of their gradients.
        exchanged: gradient bytes whose dense all-reduce would send as much as a sparse sync.
    """

    group: CopyGroup
    collective: Collective
    rows: float
    reduced: float
    exchanged: float

    def sent(self, sync: Sync) -> float:
        """Return the bytes that a rank sends to sum gradients, averaged over ranks."""
        if sync == "dense":
            return self.group.sent_of_reduced * self.reduced
        return self.group.sent_sparsely(self.rows, self.exchanged)

    def seconds(self, sync: Sync) -> float:
        """Return the seconds to sum gradients, at the bandwidth of an all-reduce."""
        calls = self.group.calls(sync)
        if not calls or not self.rows:
            return self.collective.seconds_for(self.reduced)
        num_bytes = self.sent(sync) / self.group.sent_of_reduced
        return (calls - 1) * self.collective.seconds + self.collective.seconds_for(num_bytes)

    def cheapest(self, minimise: Literal["time", "bytes"]) -> Sync:
        """Return the cheaper sync, or the dense one if both cost the same."""
        cost = self.sent if minimise == "bytes" else self.seconds
        return "sparse" if cost("sparse") < cost("dense") else "dense"


# Bisection steps over a range of rows; they end within a thousandth of it.
_BISECTIONS = 16


@dataclass(frozen=True, eq=False)
class TableDemand:
    """A table and the access frequencies of its rows.

    Attributes:
        name: name of the table.
        num_embeddings: rows of the table.
        embedding_dim: scalars of a row.
        probabilities: float64 ``[n]``, mean accesses per sample to each row, non-increasing; above
            1 if samples access the row several times.
        rows: int64 ``[n]``, the rows in the order of ``probabilities``; None means 0, 1, 2, ...
        repeats: int64 ``[n]``, number of rows with each probability; None means one each.
        tail_rows: number of rarely accessed rows that are not in ``probabilities``.
        tail_probability: mean accesses per sample to each of the tail rows.
        dedupe_factor: rows of a batch divided by the distinct rows that are looked up.
        features: number of features that are looked up in the table.
        distinct: counted distinct ids per batch, by batch size; None assumes independent accesses.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    probabilities: NDArray[np.float64]
    rows: NDArray[np.int64] | None = None
    repeats: NDArray[np.int64] | None = None
    tail_rows: int = 0
    tail_probability: float = 0.0
    dedupe_factor: float = 1.0
    features: int = 1
    distinct: data_profiles.DistinctIds | None = None

    @classmethod
    def from_access(
        cls, access: TableAccess, embedding_dim: int, dedupe_factor: float = 1.0
    ) -> TableDemand:
        """Build the demand of a table from its access profile.

        Rows with fewer accesses than the mean row that is not in the profile join the tail.
        """
        probabilities = access.probabilities()
        kept = len(probabilities)
        if access.tail_rows:
            kept = int((probabilities >= access.tail_probability).sum())
        tail_rows = access.tail_rows + len(probabilities) - kept
        tail = access.tail_rows * access.tail_probability + float(probabilities[kept:].sum())
        highest = float(probabilities[kept - 1]) if kept else np.inf
        return cls(
            name=access.table,
            num_embeddings=access.num_embeddings,
            embedding_dim=embedding_dim,
            probabilities=probabilities[:kept],
            rows=access.rows[:kept],
            tail_rows=tail_rows,
            tail_probability=min(tail / tail_rows, highest) if tail_rows else 0.0,
            dedupe_factor=dedupe_factor,
            features=len(access.features),
        )

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Group rows with equal access frequency into bins, most accessed first.

        Returns:
            Accesses per sample to each row of a bin, and the number of rows, ``[num_bins]`` each.
        """
        repeats = self.repeats
        if repeats is None:
            repeats = np.ones(len(self.probabilities), dtype=np.int64)
        if not self.tail_rows:
            return self.probabilities, repeats
        return (
            np.append(self.probabilities, self.tail_probability),
            np.append(repeats, self.tail_rows),
        )

    def accesses(self, rows: int) -> float:
        """Return the mean accesses per sample to the ``rows`` most accessed rows."""
        probabilities, repeats = self.bins()
        before = np.cumsum(repeats) - repeats
        return float(probabilities @ np.clip(rows - before, 0, repeats))

    @cached_property
    def length(self) -> float:
        """Return L, the mean accesses per sample to all rows."""
        return self.accesses(self.num_embeddings)

    def independent_rows(self, batch_size: int) -> float:
        """Return the batch size at which independent accesses give the counted distinct ids.

        Real accesses repeat more often than independent ones, so the result is smaller than
        ``batch_size``.
        """
        counted = self.distinct.of(batch_size) if self.distinct is not None else 0.0
        if counted <= 0:
            return float(batch_size)
        probabilities, repeats = self.bins()
        unread = log_unread(probabilities)
        # A batch has at least one distinct row.
        low, high = (log(min(batch_size, rows)) for rows in (self.dedupe_factor, batch_size))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            distinct = -float(np.expm1(unread * (exp(middle) / self.dedupe_factor)) @ repeats)
            low, high = (low, middle) if distinct > counted else (middle, high)
        return exp(high)

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids of rows ``start`` to ``stop`` in order of access, most accessed first."""
        if self.rows is None:
            return np.arange(start, stop, dtype=np.int64)
        known = len(self.rows)
        if stop <= known:
            return self.rows[start:stop]
        tail = np.setdiff1d(np.arange(self.num_embeddings), self.rows, assume_unique=True)
        return np.concatenate(
            [self.rows[start:stop], tail[max(start - known, 0) : stop - known]]
        ).astype(np.int64)

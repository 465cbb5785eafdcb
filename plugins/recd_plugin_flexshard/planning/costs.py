"""Cost model of hot, flex and cold rows (FlexShard, arXiv 2301.02959, sections 3 and 4).

Hot rows have a copy on every rank, flex rows a copy in every node, and cold rows no copies.
"""

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
    """Latency in seconds and bandwidth in bytes per second of a collective.

    The bandwidth counts the bytes of a rank's input tensor. For an all-to-all of embeddings, it
    counts the bytes of the forward plus the backward pass.
    """

    bytes_per_second: float
    seconds: float = 0.0

    def seconds_for(self, num_bytes: float) -> float:
        """Return the seconds that the collective takes for ``num_bytes``, or 0 for 0 bytes."""
        return self.seconds + num_bytes / self.bytes_per_second if num_bytes > 0 else 0.0


@dataclass(frozen=True)
class Collectives:
    """Speed of the four collectives that FlexShard uses.

    - ``a2a_global``: all-to-all of embeddings between all ranks, for rows without copies.
    - ``a2a_intra``: all-to-all of embeddings inside a node, for rows copied to every node.
    - ``ar_global``: all-reduce of gradients over all ranks, for rows copied to every rank.
    - ``ar_cross``: all-reduce of gradients over one rank of each node, for rows copied to every
      node.
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
    """Seconds per training step in each collective (FlexShard, table 6)."""

    a2a_global: float
    a2a_intra: float
    ar_global: float
    ar_cross: float

    def exposed(self, overlap: float = 0.0) -> float:
        """Return the communication seconds that do not overlap with compute.

        ``overlap`` is the overlapped fraction of all collectives except the global all-to-all.
        """
        return self.a2a_global + (1 - overlap) * (self.a2a_intra + self.ar_global + self.ar_cross)


@dataclass(frozen=True)
class CostOptions:
    """Parameters of the cost model, the quantity to minimise, and the memory budget.

    Attributes:
        memory_multiplier: M, memory of a copied row divided by the memory of its weights. 6 fits
            FlexShard's table 5: 1 for the weights, 2 for the optimizer and 3 for DDP.
        saved_activations: c, number of embeddings that each access to a hot row saves in memory.
        wire_bytes: bytes per scalar in all-to-alls and in the sparse sync of gradients.
        coalesce: whether a row that a batch accesses several times is sent once.
        overlap: fraction of communication time that overlaps with compute, for all collectives
            except the global all-to-all.
        minimise: ``time`` copies a row only if that saves time. ``bytes`` copies as many rows as
            memory allows, for the fewest bytes in the global all-to-all.
        sync: how gradients of copies are summed. ``dense`` all-reduces the gradients of all copies,
            ``sparse`` exchanges only gradients of accessed rows, and ``auto`` uses the cheaper way.
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
        """Return a copy of these options with ``coalesce=False``."""
        return replace(self, coalesce=False)

    @property
    def row_wise_bytes(self) -> float:
        """Return the bytes per scalar in the all-to-all over all ranks, forward plus backward."""
        return 2 * self.wire_bytes

    @property
    def flex_bytes(self) -> float:
        """Return the bytes per scalar in the all-to-all within a node, forward plus backward."""
        return 2 * self.wire_bytes

    @property
    def exposed(self) -> float:
        """Return the weight of all other collectives relative to the global all-to-all.

        It is ``1 - overlap`` if ``minimise`` is ``time``. For ``bytes`` it is tiny, so that it only
        decides between plans with equal all-to-all bytes.
        """
        return max(1e-9, 0.0 if self.minimise == "bytes" else 1.0 - self.overlap)

    def activation_bytes(self, lookups: float, sent: float) -> float:
        """Return the bytes of embeddings in memory, on the sending plus the receiving rank.

        Args:
            lookups: scalars that a batch looks up.
            sent: scalars that are sent for the batch.
        """
        return SCALAR_BYTES * (2 * sent + (lookups if self.coalesce else 0.0))


def log_unread(probabilities: Floats) -> Floats:
    """Return ``log(1 - p)``, the log of the probability that a sample does not access a row."""
    with np.errstate(divide="ignore"):
        return np.log1p(-np.minimum(probabilities, 1.0))


def rows_sent(
    probabilities: Floats, batch_size: float, dedupe_factor: float = 1.0, coalesce: bool = False
) -> Floats:
    """Return ``w``, the mean number of times that each row is sent for a batch of one rank.

    With ``B = batch_size / dedupe_factor`` and access probability ``p``, ``w`` is ``B * p``, or
    ``1 - (1 - p) ** B`` if ``coalesce`` sends each row at most once.
    """
    batch = batch_size / dedupe_factor
    if not coalesce:
        return probabilities * batch
    return -np.expm1(log_unread(probabilities) * batch)


@dataclass(frozen=True)
class RowCosts:
    """Memory in bytes and time in seconds per scalar of a row that is sent ``w`` times in a step.

    - cold (not copied): ``row_wise_static`` bytes, ``w * a2a_global`` seconds.
    - flex (copied to every node): ``flex_static`` bytes, ``w * a2a_intra + ar_cross`` seconds.
    - hot (copied to every rank): ``hot_static - w * saved`` bytes, ``ar_global`` seconds.
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
    """Method to sum gradients of hot rows (copied to every rank) and flex rows (to every node).

    ``dense`` all-reduces all copied rows, ``sparse`` exchanges only rows that a step looks up.
    """

    hot: Sync = "dense"
    flex: Sync = "dense"

    @property
    def sparse(self) -> tuple[Literal["hot", "flex"], ...]:
        """Return ``hot``, ``flex`` or both, if their gradients are summed only for used rows."""
        tiers: tuple[Literal["hot", "flex"], ...] = ("hot", "flex")
        return tuple(tier for tier in tiers if getattr(self, tier) == "sparse")


DENSE = Syncs()


@dataclass(frozen=True)
class CopyGroup:
    """A group of ranks that hold copies of the same rows and sum the gradients of these copies.

    Attributes:
        members: number of ranks in the group.
        batches: batches per step that look up a member's copies: 1 if hot, ranks per node if flex.
        repeats: mean number of accesses to a row by a batch that accesses the row.
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
        """Return the bytes that a rank sends in an all-reduce, divided by the tensor's bytes."""
        return 2 * (self.members - 1) / self.members

    def exchanged(self, sent: Floats, coalesce: bool) -> Floats:
        """Return the bytes of a sparse sync divided by the bytes of an all-reduce, for each row.

        A sparse sync exchanges only gradients of rows that a step accesses. ``sent`` is ``w``, how
        often each row is sent in a batch. A batch does not access the row with
        probability ``q = exp(-w / repeats)``, or ``1 - w`` with coalescing. One rank accesses the
        row in a fraction ``t = 1 - q ** batches`` of the steps, and any of the n ranks in
        ``u = 1 - q ** (batches * n)``. A sparse sync sends ``t + (n - 2) / n * u`` gradients.
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
        """Return the bytes that a rank sends to sum gradients of accessed rows among ``rows`` rows.

        Adds bitmaps of the accessed rows. ``exchanged`` is the size in bytes of a tensor whose
        all-reduce sends as many bytes as the gradients.
        """
        return self.sent_of_reduced * exchanged + self.bits(rows)

    def calls(self, sync: Sync) -> int:
        """Return the number of collectives besides all-reduces, 0 if ``sync`` is ``dense``.

        A ``sparse`` sync sends bitmaps, gradients and, with 3 or more ranks, sums.
        """
        if sync == "dense" or self.members == 1:
            return 0
        return 2 if self.members == 2 else 3


@dataclass(frozen=True)
class Copies:
    """Copies of rows on one rank, and the cost to sum their gradients over a group of ranks.

    Attributes:
        group: ranks with the same copies.
        collective: speed of the all-reduce.
        rows: number of copies on a rank.
        reduced: bytes of the copies' gradients.
        exchanged: size in bytes of a tensor whose all-reduce sends as many bytes as the exchange
            of gradients of accessed rows only (sparse sync).
    """

    group: CopyGroup
    collective: Collective
    rows: float
    reduced: float
    exchanged: float

    def sent(self, sync: Sync) -> float:
        """Return the bytes that a rank sends to sum the copies' gradients, averaged over ranks."""
        if sync == "dense":
            return self.group.sent_of_reduced * self.reduced
        return self.group.sent_sparsely(self.rows, self.exchanged)

    def seconds(self, sync: Sync) -> float:
        """Return the seconds to sum the copies' gradients, at the bandwidth of an all-reduce."""
        calls = self.group.calls(sync)
        if not calls or not self.rows:
            return self.collective.seconds_for(self.reduced)
        num_bytes = self.sent(sync) / self.group.sent_of_reduced
        return (calls - 1) * self.collective.seconds + self.collective.seconds_for(num_bytes)

    def cheapest(self, minimise: Literal["time", "bytes"]) -> Sync:
        """Return ``sparse`` if it is cheaper than ``dense`` in time or bytes, else ``dense``."""
        cost = self.sent if minimise == "bytes" else self.seconds
        return "sparse" if cost("sparse") < cost("dense") else "dense"


# Bisection steps over a range of rows; they end within a thousandth of it.
_BISECTIONS = 16


@dataclass(frozen=True, eq=False)
class TableDemand:
    """An embedding table and the access frequencies of its rows.

    Attributes:
        name: name of the table.
        num_embeddings: rows of the table.
        embedding_dim: scalars of a row.
        probabilities: float64 ``[n]``, mean accesses per sample to each row, non-increasing; above
            1 if samples access the row several times.
        rows: int64 ``[n]``, the rows in the order of ``probabilities``; None means 0, 1, 2, ...
        repeats: int64 ``[n]``, number of rows with each probability; None means one row each.
        tail_rows: number of rarely accessed rows that are not in ``probabilities``.
        tail_probability: mean accesses per sample to each of the tail rows.
        dedupe_factor: samples of a batch divided by the samples left after deduplication.
        features: number of features that are looked up in the table.
        distinct: measured number of distinct ids for several batch sizes; None assumes
            independent accesses.
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
        """Build a TableDemand from an access profile (access counts of the most accessed rows).

        The tail contains the rows that are not in the profile, and profiled rows with fewer
        accesses than an average row outside the profile.
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
            The accesses per sample to one row, and the number of rows, of each bin: ``[num_bins]``.
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
        """Return L, the mean number of lookups per sample in this table."""
        return self.accesses(self.num_embeddings)

    def independent_rows(self, batch_size: int) -> float:
        """Return the batch size at which independent accesses would read ``n`` distinct ids.

        ``n`` is the measured number of distinct ids in ``batch_size`` samples. Real accesses repeat
        more often, so the result is smaller than ``batch_size``.
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
        """Sort the ids by accesses, most accessed first, and return ids ``[start:stop]``."""
        if self.rows is None:
            return np.arange(start, stop, dtype=np.int64)
        known = len(self.rows)
        if stop <= known:
            return self.rows[start:stop]
        tail = np.setdiff1d(np.arange(self.num_embeddings), self.rows, assume_unique=True)
        return np.concatenate(
            [self.rows[start:stop], tail[max(start - known, 0) : stop - known]]
        ).astype(np.int64)

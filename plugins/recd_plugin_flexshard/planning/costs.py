"""What a row costs by the strategy of its tier, and from how many accesses on one is cheaper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.cluster import ClusterShape
from recd_plugins.api import SetupError


@dataclass(frozen=True)
class CostOptions:
    """What the model counts with, and what a plan is to reach.

    - ``memory_multiplier`` (M): memory of a data-parallel row in rows. 6 is what TorchRec reserves
      (the row, twice that for the optimizer, three times for DistributedDataParallel) and what
      FlexShard's table 5 was planned with; it is more than is used.
    - ``saved_activations`` (c): copies of an embedding that a data-parallel access saves.
    - ``gradient_share``: of the gradients that come back for row-wise rows, those that are sent:
      less than 1 where equal ones of a sequence travel once.
    - ``bytes_per_scalar``: of weights and of gradients that are all-reduced.
      ``activation_bytes``: of activations in memory. ``wire_bytes``: of embeddings and their
      gradients in all-to-alls, and of gradients of touched rows.
    - ``coalesce``: a row that a batch accesses several times is sent once.
    - ``overlap``: the share of the time of all collectives but the global all-to-all that is
      hidden behind other work, 0 to 1. Nothing hides the global all-to-all of sequences.
    - ``minimise``: ``time`` takes no row into a tier in which it takes more time than it saves;
      ``bytes`` takes all rows that memory allows, for the fewest bytes in the global all-to-all.
    - ``stop``: where the data-parallel tier of ``three_tier`` ends: with the last row that takes
      less memory there than in the flex tier (``dp_flex``) or in the row-wise one (``dp_rw``).
    - ``sync``: how gradients of copies are summed: ``dense``, as an all-reduce of all copies;
      ``sparse``, of the rows alone that a step touches; ``auto``: of each tier the one that takes
      less time, or fewer bytes where bytes are minimised.
    - ``memory_ratio``: the budget, in parts of what plain row-wise sharding takes (without
      deduplication and coalescing); ``memory_bytes``: the same in bytes of a rank.
    """

    memory_multiplier: float = 6.0
    saved_activations: float = 1.0
    bytes_per_scalar: float = 4.0
    activation_bytes: float = 4.0
    wire_bytes: float = 4.0
    gradient_share: float = 1.0
    coalesce: bool = False
    overlap: float = 0.0
    minimise: Literal["time", "bytes"] = "time"
    stop: Literal["dp_flex", "dp_rw"] = "dp_flex"
    sync: Literal["auto", "dense", "sparse"] = "dense"
    memory_ratio: float = 1.0
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("memory_multiplier", self.memory_multiplier >= 1),
            ("saved_activations", 0 <= self.saved_activations <= 2),
            ("bytes_per_scalar", self.bytes_per_scalar > 0),
            ("activation_bytes", self.activation_bytes > 0),
            ("wire_bytes", self.wire_bytes > 0),
            ("gradient_share", 0 < self.gradient_share <= 1),
            ("overlap", 0 <= self.overlap <= 1),
            ("minimise", self.minimise in ("time", "bytes")),
            ("stop", self.stop in ("dp_flex", "dp_rw")),
            ("sync", self.sync in ("auto", "dense", "sparse")),
            ("memory_ratio", self.memory_ratio > 0),
            ("memory_bytes", self.memory_bytes is None or self.memory_bytes > 0),
        ):
            if not allowed:
                raise SetupError(f"{name} cannot be {getattr(self, name)!r}")

    @property
    def plain(self) -> CostOptions:
        """Of plain batches: all ids are sent, and all gradients."""
        return replace(self, coalesce=False, gradient_share=1.0)

    @property
    def saved_bytes(self) -> float:
        """Memory that an access saves in the data-parallel tier, for each element of the row.

        A row-wise lookup keeps an embedding twice, where it was read and where it was sent to; a
        data-parallel one once. Coalesced, both of these come on top of the embedding of each id.
        """
        return self.activation_bytes * self.saved_activations * (2 if self.coalesce else 1)

    @property
    def row_wise_bytes(self) -> float:
        """What the global all-to-all sends for an element of a row, forward and backward."""
        return (1 + self.gradient_share) * self.wire_bytes

    @property
    def flex_bytes(self) -> float:
        """The same of the all-to-all in a node."""
        return 2 * self.wire_bytes

    @property
    def exposed(self) -> float:
        """The share of the time of all but the global all-to-all that counts.

        Where none does, a trace of it does, to tell apart plans that are otherwise equal.
        """
        return max(1e-9, 0.0 if self.minimise == "bytes" else 1.0 - self.overlap)


def rows_sent(
    probabilities: NDArray[np.float64],
    batch_size: float,
    dedupe_factor: float = 1.0,
    coalesce: bool = False,
) -> NDArray[np.float64]:
    """How often a batch of one rank has each row sent: ``w`` in what follows.

    Of the ``batch_size / dedupe_factor`` rows that are looked up, B, it is ``B * p``, and coalesced
    ``1 - (1 - p) ** B``: the share of batches that the row is in.
    """
    batch = batch_size / dedupe_factor
    if not coalesce:
        return probabilities * batch
    sent = log_unread(probabilities)
    sent *= batch
    return np.negative(np.expm1(sent, out=sent), out=sent)


def log_unread(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of the share of samples that do not access rows: 0 to -inf."""
    with np.errstate(divide="ignore"):
        return np.log1p(-np.minimum(probabilities, 1.0))


@dataclass(frozen=True)
class StrategyCost:
    """What a rank has of some rows of a table under one strategy, in a step.

    ``static_memory`` and ``dynamic_memory`` are bytes of the rows and of activations;
    ``input_ids`` those that it sends, ``rows_read`` those that it looks up; ``dynamic_comm`` bytes
    of embeddings in all-to-alls, forward and backward, ``static_comm`` bytes of gradients in
    all-reduces.
    """

    static_memory: float
    input_ids: float
    rows_read: float
    dynamic_memory: float
    dynamic_comm: float
    static_comm: float


@dataclass(frozen=True)
class Load:
    """``rows`` of ``dim`` elements, and what a batch of one rank wants of them.

    ``lookups`` are ids, ``B * L`` of a whole table; ``sent`` the rows that are sent for them, fewer
    where these are coalesced.
    """

    rows: float
    dim: int
    lookups: float
    sent: float


def row_wise(load: Load, cluster: ClusterShape, options: CostOptions) -> StrategyCost:
    """Each row on one of all ranks (FlexShard, table 2: RW)."""
    expanded = load.lookups if options.coalesce else 0.0
    return StrategyCost(
        static_memory=load.rows * load.dim * options.bytes_per_scalar / cluster.world_size,
        input_ids=load.sent,
        rows_read=load.sent,
        dynamic_memory=(expanded + 2 * load.sent) * load.dim * options.activation_bytes,
        dynamic_comm=load.sent * load.dim * options.row_wise_bytes,
        static_comm=0.0,
    )


def column_wise(load: Load, cluster: ClusterShape, options: CostOptions) -> StrategyCost:
    """Some columns of every row on each rank, which looks up the ids of all (CW)."""
    like = row_wise(load, cluster, options)
    ids = cluster.world_size * load.sent
    return StrategyCost(
        static_memory=like.static_memory,
        input_ids=ids,
        rows_read=ids,
        dynamic_memory=like.dynamic_memory,
        dynamic_comm=like.dynamic_comm,
        static_comm=0.0,
    )


def data_parallel(load: Load, cluster: ClusterShape, options: CostOptions) -> StrategyCost:
    """Every row on each rank (DP)."""
    size = load.rows * load.dim * options.bytes_per_scalar
    saved = load.sent * load.dim * options.saved_bytes
    return StrategyCost(
        static_memory=options.memory_multiplier * size,
        input_ids=0.0,
        rows_read=load.lookups,
        dynamic_memory=row_wise(load, cluster, options).dynamic_memory - saved,
        dynamic_comm=0.0,
        static_comm=size,
    )


def flex(load: Load, cluster: ClusterShape, options: CostOptions) -> StrategyCost:
    """Each row on one rank of each node (Flex)."""
    like = row_wise(load, cluster, options)
    size = load.rows * load.dim * options.bytes_per_scalar / cluster.ranks_per_node
    return StrategyCost(
        static_memory=options.memory_multiplier * size,
        input_ids=load.sent,
        rows_read=load.sent,
        dynamic_memory=like.dynamic_memory,
        dynamic_comm=load.sent * load.dim * options.flex_bytes,
        static_comm=size,
    )


@dataclass(frozen=True)
class RowCosts:
    """What one element of a row costs: bytes, and seconds that are not hidden.

    A row that a batch has sent ``w`` times takes in the row-wise tier ``row_wise_static`` bytes and
    ``w * a2a_global`` seconds; in the flex tier ``flex_static`` and
    ``w * a2a_intra + ar_cross``; in the data-parallel one ``hot_static - w * saved`` and
    ``ar_global``.
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
        scalar, node = options.bytes_per_scalar, cluster.ranks_per_node
        multiplier = options.memory_multiplier
        collectives, exposed = cluster.collectives, options.exposed
        return cls(
            row_wise_static=scalar / cluster.world_size,
            flex_static=scalar * multiplier / node,
            hot_static=scalar * multiplier,
            saved=options.saved_bytes,
            a2a_global=options.row_wise_bytes / collectives.a2a_global.bytes_per_second,
            a2a_intra=exposed * options.flex_bytes / collectives.a2a_intra.bytes_per_second,
            ar_global=exposed * scalar / collectives.ar_global.bytes_per_second,
            ar_cross=exposed * scalar / node / collectives.ar_cross.bytes_per_second,
        )

    @property
    def mem_dp_rw(self) -> float:
        """The w from which a row takes less memory in the data-parallel than the row-wise tier."""
        return _ratio(self.hot_static - self.row_wise_static, self.saved)

    @property
    def mem_dp_flex(self) -> float:
        """The same, than in the flex tier."""
        return _ratio(self.hot_static - self.flex_static, self.saved)

    @property
    def comm_dp_rw(self) -> float:
        """The w from which a row takes less time in the data-parallel than the row-wise tier."""
        return _ratio(self.ar_global, self.a2a_global)

    @property
    def comm_flex_rw(self) -> float:
        """The same, in the flex than in the row-wise tier."""
        return _ratio(self.ar_cross, self.a2a_global - self.a2a_intra)


def _ratio(cost: float, saving: float) -> float:
    return cost / saving if saving > 0 else inf


def breakpoints(cluster: ClusterShape, options: CostOptions) -> dict[str, float]:
    """Accesses of a row by a sample, p, from which another tier is better for it.

    ``mem_dp_rw`` and ``mem_dp_flex`` for memory, ``comm_dp_rw`` and ``comm_flex_rw`` for time
    (FlexShard, section 4); without deduplication. ``inf`` where it never is.
    """
    costs = RowCosts.of(cluster, options)
    sent = {
        "mem_dp_rw": costs.mem_dp_rw,
        "mem_dp_flex": costs.mem_dp_flex,
        "comm_dp_rw": costs.comm_dp_rw,
        "comm_flex_rw": costs.comm_flex_rw,
    }
    if not options.coalesce:
        return {name: w / cluster.batch_size for name, w in sent.items()}
    return {
        name: 1 - (1 - w) ** (1 / cluster.batch_size) if w < 1 else inf for name, w in sent.items()
    }

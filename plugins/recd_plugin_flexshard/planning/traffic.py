"""What a step sends by tier, as ``CollectiveBytes`` counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from recd_plugin_flexshard.planning.plan import TableTiers, TierPlan
from recd_plugin_flexshard.planning.sync import CopyGroup, Sync, Syncs

Tier = Literal["cold", "hot", "flex", "flex_gradients"]
TIERS: tuple[Tier, ...] = ("cold", "hot", "flex", "flex_gradients")


@dataclass(frozen=True)
class TierTraffic:
    """The collective of a tier in a step: bytes that a rank sends to others, mean over ranks.

    ``collective``: ``sparse`` is that of gradients of touched rows alone. ``integer_bytes``: ids,
    lengths and sizes, and bits of touched rows; ``float_bytes``: embeddings and gradients, forward
    and backward; ``seconds``: the cost model's.
    """

    collective: Literal["all_to_all", "all_reduce", "sparse"]
    group: Literal["global", "node", "cross"]
    integer_bytes: float
    float_bytes: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.integer_bytes + self.float_bytes


#: Ids and sizes are int64; lengths int32, as all converters of this package make them.
ID_BYTES, LENGTH_BYTES = 8, 4


def num_features(plan: TierPlan) -> int:
    """The number of features of all tables of ``plan``."""
    return sum(table.demand.features for table in plan.tables)


def cold_size_bytes(plan: TierPlan) -> int:
    """Bytes of how many ids, lengths and lists come, which a rank tells each other one first."""
    return 3 * ID_BYTES * (plan.cluster.world_size - 1)


def flex_size_bytes(plan: TierPlan) -> int:
    """The same in a node: how many ids of each feature; 0 where no table has flex rows."""
    if not any(table.flex for table in plan.tables):
        return 0
    return num_features(plan) * ID_BYTES * (plan.cluster.ranks_per_node - 1)


def traffic(plan: TierPlan) -> dict[Tier, TierTraffic]:
    """What each tier of ``plan`` sends in a step (conventions of docs/measuring.md).

    Of n ranks that ids are spread over, one sends (n - 1) / n of them to others, and 2 (n - 1) / n
    of a tensor that is reduced; of a sparse sync as ``CopyGroup`` says. The global all-to-all also
    sends the lengths of all lists, to each rank; coalesced, one a feature. All tables of the plan
    count as those of one EmbeddingCollection, whose ranks tell each other once how much comes.
    """
    cluster, options, tables = plan.cluster, plan.options, plan.tables
    ranks, node = cluster.world_size, cluster.ranks_per_node

    def scalars(rows: Callable[[TableTiers], float]) -> float:
        return sum(t.demand.embedding_dim * rows(t) for t in tables)

    def gradients(
        name: Literal["global", "cross"],
        group: CopyGroup,
        sync: Sync,
        rows: Callable[[TableTiers], float],
        exchanged: Callable[[TableTiers], float],
        seconds: float,
    ) -> TierTraffic:
        if sync == "dense":
            reduced = options.bytes_per_scalar * scalars(rows)
            num_bytes = 2 * _others(group.members) * reduced
            return TierTraffic("all_reduce", name, 0.0, num_bytes, seconds)
        bits = group.bits(sum(rows(t) for t in tables))
        num_bytes = group.sent_of_reduced * options.wire_bytes * scalars(exchanged)
        return TierTraffic("sparse", name, bits, num_bytes, seconds)

    lists = float(num_features(plan))
    if not options.coalesce:
        lists = sum(t.demand.features / t.demand.dedupe_factor for t in tables) * cluster.batch_size
    cold_ids = ID_BYTES * sum(t.cold_sent for t in tables)
    flex_ids = ID_BYTES * sum(t.flex_sent for t in tables)
    return {
        "cold": TierTraffic(
            "all_to_all",
            "global",
            integer_bytes=_others(ranks) * cold_ids
            + (ranks - 1) * LENGTH_BYTES * lists
            + cold_size_bytes(plan),
            float_bytes=_others(ranks) * options.row_wise_bytes * scalars(lambda t: t.cold_sent),
            seconds=plan.seconds.a2a_global,
        ),
        "hot": gradients(
            "global",
            CopyGroup.hot(cluster),
            plan.syncs.hot,
            lambda t: t.hot,
            lambda t: t.hot_exchanged,
            plan.seconds.ar_global,
        ),
        "flex": TierTraffic(
            "all_to_all",
            "node",
            integer_bytes=_others(node) * flex_ids + flex_size_bytes(plan),
            float_bytes=_others(node) * options.flex_bytes * scalars(lambda t: t.flex_sent),
            seconds=plan.seconds.a2a_intra,
        ),
        "flex_gradients": gradients(
            "cross",
            CopyGroup.flex(cluster),
            plan.syncs.flex,
            lambda t: t.flex / node,
            lambda t: t.flex_exchanged / node,
            plan.seconds.ar_cross,
        ),
    }


def sync_bytes(plan: TierPlan) -> dict[Literal["hot", "flex"], dict[Sync, float]]:
    """What a rank sends for gradients of the copies of each tier, by sync.

    Sparse ones are known of a plan that may have them alone.
    """
    allowed: tuple[Sync, ...] = ("dense",) if plan.options.sync == "dense" else ("dense", "sparse")
    by_sync = {sync: traffic(replace(plan, syncs=Syncs(sync, sync))) for sync in allowed}
    return {
        "hot": {sync: sent["hot"].bytes for sync, sent in by_sync.items()},
        "flex": {sync: sent["flex_gradients"].bytes for sync, sent in by_sync.items()},
    }


def _others(ranks: int) -> float:
    """The share of what is spread evenly over ``ranks`` that is another's."""
    return (ranks - 1) / ranks

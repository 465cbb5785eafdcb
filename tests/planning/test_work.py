"""The work of a step, against that of a real step and by hand; and the seconds of work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_registry import hashed, papercal, write_registry
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from recd_plugins import load_registry
from recd_plugins.interfaces import Table, TableStrategy
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds, FeatureProfile
from recd_plugins.interfaces.step_cost import (
    AllToAllCost,
    GemmCost,
    LookupCost,
    OtherCost,
    StageCosts,
    StepCost,
)
from recd_plugins.planning.compute import count_operations, measure_compute
from recd_plugins.planning.step_cost import (
    Compute,
    Operations,
    bytes_of_tables,
    estimate_step_cost,
    predict_stages,
)
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import load_topology, this_machine
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

# Four steps are counted, and they read the whole table.
BATCH_SIZE, RANKS, ROWS = 64, 2, 512

SPARSE = ["seq_[01]_0", "seq_0_1", "item_*", "usr_0", "usr_1", "usr_2", "usr_10", "usr_21"]
TABLES = {
    "row_wise": ["t_usr_1*", "t_seq_0*"],
    "table_wise": ["t_item*", "t_usr_[02-9]", "t_usr_2?", "t_seq_[12]*"],
}
NOTHING = Compute(Operations(), Operations(), 0)


@pytest.mark.parametrize(
    ("converter", "coalesce", "wire"),
    [("recd.kjt", True, "fp32"), ("recd.ikjt", False, "bf16")],
)
def test_ids_and_bytes_of_a_run(tmp_path: Path, converter: str, coalesce: bool, wire: str) -> None:
    path = write_registry(
        tmp_path,
        dataset=papercal(tmp_path, ROWS, 64, sparse=SPARSE),
        converter={"use": converter},
        preprocessing=hashed(500),
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        sharding=[
            {"use": f"torchrec.{kind}", "tables": tables, "options": {"coalesce": coalesce}}
            for kind, tables in TABLES.items()
        ],
        model={"embedding_dim": 8, "num_embeddings": 500, "bottom_mlp": [16], "top_mlp": [16]},
        training={"batch_size": BATCH_SIZE, "ranks": RANKS, "epochs": 2, "evaluate": False},
    )
    with session(Job(path, overrides={"wire": wire})) as trainer:
        seen = trainer.train("plugins")
    registry = load_registry(path).with_training({"wire": wire})
    candidate = with_plugins(registry.with_training({"batch_size": ROWS}))
    works = estimate_step_cost(
        candidate.tables,
        candidate.plan(this_machine(RANKS).to_torchrec(), BATCH_SIZE).sharding,
        candidate.profile,
        measure_compute(registry),
        batch_size=BATCH_SIZE,
        world_size=RANKS,
        wire=wire,
    )
    kinds = ("all_to_all", "reduce_scatter", "all_gather")
    exchanged = sum(seen.collective_bytes.get(kind, 0.0) for kind in kinds)
    assert sum(work.ids_looked_up for work in works) == pytest.approx(seen.ids_looked_up, rel=0.1)
    assert sum(work.bytes_in_node for work in works) == pytest.approx(exchanged, rel=0.1)
    assert sum(work.bytes_reduced for work in works) == pytest.approx(
        seen.collective_bytes["all_reduce"], rel=0.01
    )


def plan(kind: str, *shards: tuple[int, int, int]) -> ShardingPlan:
    by_columns = kind == "column_wise"
    placed = [
        ShardMetadata(
            [0, index * columns] if by_columns else [index * rows, 0],
            [rows, columns],
            placement=f"rank:{rank}/cpu",
        )
        for index, (rank, rows, columns) in enumerate(shards)
    ]
    spec = EnumerableShardingSpec(placed) if placed else None
    sharding = ParameterSharding(kind, "fused", [rank for rank, *_ in shards], spec)
    return ShardingPlan({"": EmbeddingModuleShardingPlan({"t": sharding})})


def works(
    sharding: ShardingPlan,
    *,
    pooled: bool = True,
    local_world_size: int = 4,
    unique: float = 0.0,
    joined: bool = False,
    gloo: bool = False,
) -> list[StepCost]:
    """Of 4 ranks with batches of 10 rows of 3 ids; a table of 100 rows of 8 scalars."""
    feature = FeatureProfile(3.0, unique > 0, unique, unique, unique)
    return estimate_step_cost(
        [Table("t", ("f",), 100, 8, pooled)],
        sharding,
        DataProfile({"f": feature}),
        NOTHING,
        batch_size=10,
        world_size=4,
        local_world_size=local_world_size,
        joined=joined,
        gloo=gloo,
    )


TABLE_WISE = plan("table_wise", (0, 100, 8))
ROW_WISE = plan("row_wise", *((rank, 25, 8) for rank in range(4)))
TABLE_ROW_WISE = plan("table_row_wise", (0, 50, 8), (1, 50, 8))
REPLICATED = plan("data_parallel")
NODES = {"local_world_size": 2}
GLOO: dict[str, Any] = {"gloo": True}
UNIQUE: dict[str, Any] = {"unique": 5.0}


@pytest.mark.parametrize(
    ("sharding", "options", "collectives"),
    [
        (TABLE_WISE, {}, 4),
        (TABLE_WISE, UNIQUE, 5),
        (TABLE_WISE, UNIQUE | {"pooled": False}, 4),
        (TABLE_WISE, GLOO, 4),
        (ROW_WISE, {}, 4),
        (ROW_WISE, GLOO, 4 + 9 / 6),  # nine rounds between four ranks
        (ROW_WISE, GLOO | {"pooled": False}, 4),
        (ROW_WISE, UNIQUE | NODES, 5),
        (ROW_WISE, GLOO | UNIQUE | NODES, 8),
        (TABLE_ROW_WISE, GLOO | NODES, 4.7),
        (TABLE_ROW_WISE, GLOO | UNIQUE | NODES, 9),
        (REPLICATED, {}, 1),
        (REPLICATED, GLOO, 1 + 3),  # nothing else is sent, so ranks wait there
    ],
)
def test_collectives(sharding: ShardingPlan, options: Any, collectives: float) -> None:
    for work in works(sharding, **options):
        assert work.collectives == pytest.approx(collectives)


def test_table_wise() -> None:
    owner, other, *_ = works(TABLE_WISE)
    assert owner.ids_looked_up == 4 * 30
    assert owner.bytes_looked_up == 4 * 30 * 8 * 4
    assert owner.bytes_in_node == 3 * 10 * 8 * 4  # vectors to three others
    assert other.ids_looked_up == 0
    assert other.bytes_in_node == 30 * 8 + 10 * 4 + 10 * 8 * 4  # ids, lengths, gradients
    owner, *_ = works(TABLE_WISE, pooled=False)
    assert owner.bytes_in_node == 3 * 30 * 8 * 4  # a vector for each id


def test_ids_of_all_modules_come_at_once_to_overlapping_ranks_of_gloo() -> None:
    (one,) = TABLE_WISE.plan.values()
    modules = ShardingPlan({"a": one, "b": one})

    def joined(sharding: ShardingPlan, unique: float = 0.0) -> float:
        return works(sharding, unique=unique, gloo=True, joined=True)[0].collectives

    assert joined(ShardingPlan({"a": one})) == 4
    # Outputs and gradients of two, lengths and ids of one, numbers of rows with them.
    assert joined(modules) == joined(modules, unique=5.0) == 6
    assert joined(ShardingPlan({"a": one, "b": REPLICATED.plan[""]})) == 5


def test_embeddings_of_sequences_are_put_in_order() -> None:
    sent = 10 * 3 * 8 * 4  # bytes of the embeddings of a rank's batch
    in_order = [work.element_bytes for work in works(ROW_WISE, pooled=False)]
    assert in_order == 4 * [(4 + 6) * sent]
    whole = plan("table_wise", (1, 100, 8))
    assert [w.element_bytes for w in works(whole, pooled=False)] == [0, 4 * 4 * sent, 0, 0]
    assert [work.element_bytes for work in works(ROW_WISE)] == 4 * [0]


def test_row_wise_spreads_ids_and_sums_everywhere() -> None:
    for work in works(ROW_WISE):
        assert work.ids_looked_up == 30
        # Partial sums of all rows to three others, and gradients to them; a quarter of the ids.
        assert work.bytes_in_node == 3 * (2 * 10 * 8 * 4 + 30 / 4 * 8 + 10 * 4)


def test_gloo_reduces_what_others_reduce_and_scatter() -> None:
    """As it was counted on links: twice the bytes, in a ring that leaves a node once."""
    ids, ring = 30 / 4 * 8 + 10 * 4, (2 + 1) * 3 * 10 * 8 * 4
    for work in works(ROW_WISE, gloo=True):
        assert (work.bytes_in_node, work.bytes_across_nodes) == (3 * ids + ring, 0)
    for work in works(ROW_WISE, local_world_size=2, gloo=True):
        assert work.bytes_across_nodes == 2 * ids + ring / 2
        assert work.bytes_in_node == ids + ring / 2
    # What is deduplicated goes to each rank by itself.
    for one, other in zip(
        works(ROW_WISE, unique=0.5, gloo=True), works(ROW_WISE, unique=0.5), strict=True
    ):
        assert replace(one, collectives=other.collectives) == other


def test_rows_learn_once_however_often_ids_are_of_them() -> None:
    tables, feature = [Table("t", ("f",), 100, 8, pooled=True)], {"f": FeatureProfile(3.0)}
    read = DataProfile(feature, read={"t": DistinctIds((10, 40), (20.0, 50.0))})
    for profile, rows in ((DataProfile(feature), 120), (read, 50), (read.plain(), 50)):
        for sharding, expected in ((TABLE_WISE, [rows, 0, 0, 0]), (ROW_WISE, [rows / 4] * 4)):
            found = estimate_step_cost(
                tables, sharding, profile, NOTHING, batch_size=10, world_size=4
            )
            assert [work.rows_updated for work in found] == expected


def test_tables_that_are_sharded_alike_are_looked_up_in_one_call() -> None:
    tables = [Table(name, (name,), 100, 8, pooled=True) for name in "abc"]
    profile = DataProfile({name: FeatureProfile(3.0) for name in "abc"})
    (split,) = plan("row_wise", (0, 50, 8), (1, 50, 8)).plan[""].values()  # type: ignore[attr-defined]
    (whole,) = TABLE_WISE.plan[""].values()  # type: ignore[attr-defined]

    def calls(**shardings: ParameterSharding) -> list[float]:
        modules = ShardingPlan({"": EmbeddingModuleShardingPlan(shardings)})
        works = estimate_step_cost(tables, modules, profile, NOTHING, batch_size=10, world_size=2)
        return [work.lookups for work in works]

    assert calls(a=whole, b=whole, c=whole) == [1, 0]
    assert calls(a=split, b=split) == [1, 1]
    assert calls(a=split, b=whole, c=whole) == [2, 1]


def test_column_wise_sends_ids_to_each_shard() -> None:
    ranks = works(plan("column_wise", (0, 100, 4), (1, 100, 4)))
    assert [work.ids_looked_up for work in ranks] == [120, 120, 0, 0]
    assert ranks[2].bytes_in_node == 2 * (30 * 8 + 10 * 4 + 10 * 4 * 4)


def test_data_parallel_reduces_the_table_and_all_of_it_learns() -> None:
    for work in works(REPLICATED):
        assert work.ids_looked_up == 30
        assert work.bytes_reduced == 2 * 3 / 4 * 100 * 8 * 4
        assert work.element_bytes == 15 * 100 * 8 * 4
        assert work.bytes_in_node == 0


def test_nodes() -> None:
    owner, neighbour, *far = works(TABLE_WISE, local_world_size=2)
    vectors = 10 * 8 * 4
    assert (owner.bytes_in_node, owner.bytes_across_nodes) == (vectors, 2 * vectors)
    assert neighbour.bytes_across_nodes == 0
    assert all(work.bytes_in_node == 0 < work.bytes_across_nodes for work in far)
    # Row-wise in a node: each of its ranks sends the node's sums for one rank of the other.
    ranks = works(TABLE_ROW_WISE, local_world_size=2)
    inputs = 2 * (15 * 8 + 10 * 4)
    assert ranks[0].bytes_across_nodes == vectors
    assert ranks[2].bytes_across_nodes == inputs + vectors


class Hot(TableStrategy):
    """A quarter of the ids of each table go to shards."""

    def sharded_share(self, table: str) -> float:
        return 0.25


def test_ids_that_parts_keep_are_not_sent() -> None:
    tables, sharding = [Table("t", ("f",), 100, 8, pooled=False)], TABLE_WISE.plan[""]
    profile, sizes = DataProfile({"f": FeatureProfile(3.0)}), {"batch_size": 10, "world_size": 4}
    whole, quarter = (
        bytes_of_tables(tables, sharding, profile, **sizes, parts=parts)["t"]  # type: ignore[arg-type]
        for parts in ((), (Hot(),))
    )
    lengths = 3 * 10 * 4
    assert quarter - lengths == (whole - lengths) / 4


COSTS = StageCosts(
    lookup=LookupCost(steps=1e-3, bytes_looked_up=2e-9),
    gemm=GemmCost(matmul_flops=1e-10),
    all_to_all=AllToAllCost(collectives=1e-4, bytes_in_node=1e-9),
    other=OtherCost(steps=2e-3, element_bytes=1e-10, operators=1e-8),
)


def work(scale: float) -> StepCost:
    return StepCost(
        ids_looked_up=1e5,
        bytes_looked_up=1e6 * scale,
        collectives=4,
        bytes_in_node=2e6 * scale,
        matmul_flops=1e8 * scale,
        element_bytes=1e8 * scale,
        operators=1e6 * scale**0.5,
    )


def test_ranks_with_less_work_wait_in_the_all_to_all() -> None:
    even, uneven = [work(2), work(2)], [work(1), work(3)]
    alone = predict_stages(even, COSTS)
    assert predict_stages([work(2)], COSTS) == alone
    most = predict_stages([work(3)], COSTS)
    assert predict_stages(uneven, COSTS).total == pytest.approx(most.total)


def test_topologies_give_lower_bounds() -> None:
    topology = load_topology("dgx-h100", nodes=2)
    costs = topology.least_costs
    assert costs.gemm.matmul_flops == 1 / topology.flops
    assert costs.all_to_all.bytes_across_nodes == 1 / topology.inter_node_bandwidth
    sent = 2 * 15 / 16  # of a tensor, by each of 16 ranks
    assert costs.all_reduce.bytes_reduced * sent == pytest.approx(
        1 / topology.collective_rates.ar_global.bytes_per_second
    )
    cpu = this_machine(2)
    assert cpu.least_costs.lookup.bytes_looked_up == 3 / cpu.ddr_bandwidth
    assert cpu.least_costs.lookup.bytes_from_host == 1 / cpu.ddr_bandwidth
    assert topology.hbm_to_ddr_bandwidth
    assert costs.lookup.bytes_from_host == 1 / topology.hbm_to_ddr_bandwidth


@pytest.mark.parametrize("ranks", [3, 1024])
def test_ranks_with_equal_work_wait_for_none(ranks: int) -> None:
    assert predict_stages([StepCost(element_bytes=0.1)] * ranks, COSTS).all_to_all == 0.0


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False)

    def forward(self, batch: ModelInput) -> tuple[Tensor]:
        x = self.layer(batch.dense_features)
        heads = x.view(2, 1, -1, 5)
        return (F.scaled_dot_product_attention(heads, heads, heads).sum(),)


def test_operations_of_products_and_attention() -> None:
    batch = ModelInput(torch.ones(8, 6), None, torch.ones(8))
    compute = count_operations(Products(), batch)
    assert compute.parameter_bytes == 4 * 30
    # Once forward and once for the gradient of the weight; 2 x 4 x 4 scores of 5 each.
    assert compute.rest.matmul_flops * 8 == 8 * 2 * 2 * 6 * 5 + (2 + 5) * 2 * 2 * 4 * 4 * 5
    assert compute.rest.element_bytes > 0
    # Forward and backward; and Adagrad's of the one parameter.
    assert compute.operators > 6 + 2 * 3
    assert compute.pooling == Operations()

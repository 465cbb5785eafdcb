"""The work that is computed of a step is the work that a real step is seen to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from recd_plugins import load_registry
from recd_plugins.interfaces import Table, TableStrategy
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds, FeatureProfile
from recd_plugins.interfaces.step_cost import StepCost
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.step_cost import Compute, Operations, bytes_of_tables, estimate_step_cost
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import this_machine
from recd_plugins.training.session import session

# Four steps are counted, and they read the whole table.
BATCH_SIZE, RANKS, ROWS = 64, 2, 512

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    generate: {{rows: 512, row_group_rows: 64}}
    sparse: ["seq_[01]_0", "seq_0_1", "item_*", usr_0, usr_1, usr_2, usr_10, usr_21]
converter: {{use: {converter}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 500}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
sharding:
  - {{use: torchrec.row_wise, tables: ["t_usr_1*", "t_seq_0*"], options: {{coalesce: {coalesce}}}}}
  - use: torchrec.table_wise
    tables: ["t_item*", "t_usr_[02-9]", "t_usr_2?", "t_seq_[12]*"]
    options: {{coalesce: {coalesce}}}
model: {{embedding_dim: 8, num_embeddings: 500, bottom_mlp: [16], top_mlp: [16]}}
training: {{batch_size: 64, ranks: 2, epochs: 2, evaluate: false}}
"""

NOTHING = Compute(Operations(), Operations(), 0)


@pytest.mark.parametrize(
    ("converter", "coalesce", "wire"),
    [
        ("recd.kjt", "false", "fp32"),
        ("recd.kjt", "true", "fp32"),
        ("recd.ikjt", "false", "bf16"),
        ("recd.ikjt", "true", "fp32"),
        ("recd.ikjt", "true", "int8"),
    ],
)
def test_ids_and_bytes_are_those_of_a_run(
    tmp_path: Path, converter: str, coalesce: str, wire: str
) -> None:
    path = tmp_path / "registry.yaml"
    text = REGISTRY.format(folder=tmp_path, converter=converter, coalesce=coalesce)
    if wire == "int8":  # in blocks of 16, and no sums that are added up on their way
        text = text.replace("embedding_dim: 8", "embedding_dim: 16")
        text = text.replace('"t_usr_1*", ', "").replace("t_usr_[02-9]", "t_usr_*")
    path.write_text(text, encoding="utf-8")
    overrides: dict[str, Any] = {"wire": wire}
    if wire == "int8":  # else rows learn as much by gradients that are rounding as by others
        overrides |= {"learning_rate": 0.1, "dense_learning_rate": 0.005, "eps": 1e-2}
    with session(path, overrides=overrides) as trainer:
        seen = trainer.train("plugins")
        plain = trainer.train("baseline") if wire == "int8" else None
    if plain is not None:
        apart = np.abs(np.subtract(seen.losses, plain.losses))
        assert 1e-6 < apart.max() < 1e-2
        assert abs(plain.losses[-1] - plain.losses[0]) > 5 * apart.max()
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
    """Of table t: rank, rows and columns of each shard."""
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
    compute: Compute = NOTHING,
    overlapped: bool = False,
    gloo: bool = False,
    parts: Sequence[TableStrategy] = (),
) -> list[StepCost]:
    """Of 4 ranks with batches of 10 rows of 3 ids; a table of 100 rows of 8 scalars."""
    feature = FeatureProfile(3.0, unique > 0, unique, unique, unique)
    return estimate_step_cost(
        [Table("t", ("f",), 100, 8, pooled)],
        sharding,
        DataProfile({"f": feature}),
        compute,
        batch_size=10,
        world_size=4,
        local_world_size=local_world_size,
        overlapped=overlapped,
        gloo=gloo,
        parts=parts,
    )


def test_table_wise() -> None:
    owner, other, *_ = works(plan("table_wise", (0, 100, 8)))
    assert owner.ids_looked_up == 4 * 30
    assert owner.bytes_looked_up == 4 * 30 * 8 * 4
    assert owner.bytes_in_node == 3 * 10 * 8 * 4  # vectors to three others
    assert other.ids_looked_up == 0
    assert other.bytes_in_node == 30 * 8 + 10 * 4 + 10 * 8 * 4  # ids, lengths, gradients
    assert owner.collectives == other.collectives == 4


def test_a_deduplicated_batch_says_how_many_rows_its_features_have() -> None:
    table_wise = plan("table_wise", (0, 100, 8))
    assert {rank.collectives for rank in works(table_wise, unique=5.0)} == {5}
    # Of sequences a rank needs to know no more than their ids.
    assert {rank.collectives for rank in works(table_wise, unique=5.0, pooled=False)} == {4}


def test_sums_of_split_bags_go_round_on_gloo() -> None:
    row_wise = plan("row_wise", *((rank, 25, 8) for rank in range(4)))
    table_wise = plan("table_wise", (0, 100, 8))
    assert works(row_wise)[0].collectives == 4
    # Nine rounds between four ranks.
    assert works(row_wise, gloo=True)[0].collectives == pytest.approx(4 + 9 / 6)
    assert works(row_wise, gloo=True, pooled=False)[0].collectives == 4
    assert works(table_wise, gloo=True)[0].collectives == 4


def test_sums_of_split_bags_take_more_on_gloo() -> None:
    """Those over the ranks of a node too, and more of features that have fewer rows."""
    taken = {
        kind: [
            works(plan(kind, *shards), local_world_size=2, gloo=gloo, unique=unique)[0].collectives
            for gloo, unique in ((True, 0.0), (True, 5.0), (False, 5.0))
        ]
        for kind, shards in {
            "table_wise": [(0, 100, 8)],
            "table_row_wise": [(0, 50, 8), (1, 50, 8)],
            "row_wise": [(rank, 25, 8) for rank in range(4)],
        }.items()
    }
    assert taken == {
        "table_wise": [4, 5, 5],
        "table_row_wise": [pytest.approx(4.7), 9, 5],
        "row_wise": [pytest.approx(5.5), 8, 5],
    }


def test_ids_of_all_modules_come_at_once_to_overlapping_ranks_of_gloo() -> None:
    (one,) = plan("table_wise", (0, 100, 8)).plan.values()
    modules = ShardingPlan({"a": one, "b": one})
    assert (
        works(modules, gloo=True)[0].collectives == works(modules, overlapped=True)[0].collectives
    )

    def joined(sharding: ShardingPlan, unique: float = 0.0) -> float:
        return works(sharding, unique=unique, gloo=True, overlapped=True)[0].collectives

    assert joined(ShardingPlan({"a": one})) == 4
    # Outputs and gradients of two, lengths and ids of one, numbers of rows with them.
    assert joined(modules) == 6
    assert joined(modules, unique=5.0) == 6
    replicated = plan("data_parallel").plan[""]
    assert joined(ShardingPlan({"a": one, "b": replicated})) == 5


def test_ranks_of_gloo_wait_in_sums_of_gradients_where_nothing_else_is_sent() -> None:
    alone = plan("data_parallel")
    assert works(alone)[0].collectives == 1
    assert works(alone, gloo=True)[0].collectives == 1 + 3
    both = ShardingPlan(dict.fromkeys("ab", alone.plan[""]))
    assert works(both, gloo=True)[0].collectives == 2 + 3


def test_a_sequence_table_gives_a_vector_for_each_id() -> None:
    owner, *_ = works(plan("table_wise", (0, 100, 8)), pooled=False)
    assert owner.bytes_in_node == 3 * 30 * 8 * 4


def test_embeddings_of_sequences_are_put_in_order() -> None:
    """By ranks where they are looked up, and of row-wise tables by the batch where they arrive."""
    sent = 10 * 3 * 8 * 4  # bytes of the embeddings of a rank's batch
    split = plan("row_wise", *((rank, 25, 8) for rank in range(4)))
    in_order = [work.element_bytes for work in works(split, pooled=False)]
    assert in_order == 4 * [(4 + 6) * sent]
    whole = plan("table_wise", (1, 100, 8))
    assert [w.element_bytes for w in works(whole, pooled=False)] == [0, 4 * 4 * sent, 0, 0]
    assert [work.element_bytes for work in works(split)] == 4 * [0]
    assert [work.element_bytes for work in works(plan("table_wise", (1, 100, 8)))] == 4 * [0]


def test_row_wise_spreads_ids_and_sums_everywhere() -> None:
    ranks = works(plan("row_wise", *((rank, 25, 8) for rank in range(4))))
    for work in ranks:
        assert work.ids_looked_up == 30
        # Partial sums of all rows to three others, and gradients to them; a quarter of the ids.
        assert work.bytes_in_node == 3 * (2 * 10 * 8 * 4 + 30 / 4 * 8 + 10 * 4)


def test_gloo_reduces_what_others_reduce_and_scatter() -> None:
    """As it was counted on links: twice the bytes, in a ring that leaves a node once."""
    split = plan("row_wise", *((rank, 25, 8) for rank in range(4)))
    ids, ring = 30 / 4 * 8 + 10 * 4, (2 + 1) * 3 * 10 * 8 * 4
    for work in works(split, gloo=True):
        assert (work.bytes_in_node, work.bytes_across_nodes) == (3 * ids + ring, 0)
    for work in works(split, local_world_size=2, gloo=True):
        assert work.bytes_across_nodes == 2 * ids + ring / 2
        assert work.bytes_in_node == ids + ring / 2
    # What is deduplicated goes to each rank by itself.
    for one, other in zip(
        works(split, unique=0.5, gloo=True), works(split, unique=0.5), strict=True
    ):
        assert replace(one, collectives=other.collectives) == other


def test_rows_learn_once_however_often_ids_are_of_them() -> None:
    one = {
        "tables": [Table("t", ("f",), 100, 8, pooled=True)],
        "compute": NOTHING,
        "batch_size": 10,
        "world_size": 4,
    }
    feature = {"f": FeatureProfile(3.0)}
    split = plan("row_wise", *((rank, 25, 8) for rank in range(4)))
    read = DataProfile(feature, read={"t": DistinctIds((10, 40), (20.0, 50.0))})
    for profile, rows in ((DataProfile(feature), 120), (read, 50), (read.plain(), 50)):
        whole = estimate_step_cost(plan=plan("table_wise", (0, 100, 8)), profile=profile, **one)  # type: ignore[arg-type]
        assert [work.rows_updated for work in whole] == [rows, 0, 0, 0]
        for work in estimate_step_cost(plan=split, profile=profile, **one):  # type: ignore[arg-type]
            assert work.rows_updated == rows / 4


def test_tables_that_are_sharded_alike_are_looked_up_in_one_call() -> None:
    names = ("a", "b", "c")
    tables = [Table(name, (name,), 100, 8, pooled=True) for name in names]
    profile = DataProfile({name: FeatureProfile(3.0) for name in names})
    split = plan("row_wise", *((rank, 50, 8) for rank in range(2)))
    (of_split,) = split.plan[""].values()  # type: ignore[attr-defined]
    (whole,) = plan("table_wise", (0, 100, 8)).plan[""].values()  # type: ignore[attr-defined]

    def calls(**shardings: ParameterSharding) -> list[float]:
        modules = ShardingPlan({"": EmbeddingModuleShardingPlan(shardings)})
        works = estimate_step_cost(tables, modules, profile, NOTHING, batch_size=10, world_size=2)
        return [work.lookups for work in works]

    assert calls(a=whole, b=whole, c=whole) == [1, 0]
    assert calls(a=of_split, b=of_split) == [1, 1]
    assert calls(a=of_split, b=whole, c=whole) == [2, 1]


def test_tables_with_fewer_ids_have_more_operators() -> None:
    table = Table("t", ("f",), 100, 8, pooled=True)

    def operators(profile: DataProfile) -> float:
        whole = plan("table_wise", (0, 100, 8))
        made = Compute(Operations(), Operations(), 0, operators=7)
        return estimate_step_cost([table], whole, profile, made, batch_size=10, world_size=2)[
            0
        ].operators

    feature = FeatureProfile(3.0, True, 0.5, 0.5, 0.5)
    coalesced = DataProfile({"f": feature}, distinct={"t": DistinctIds((10,), (9.0,))})
    plain, deduplicated = operators(coalesced.plain()), operators(DataProfile({"f": feature}))
    assert plain == 7 < deduplicated < operators(coalesced)


def test_column_wise_sends_ids_to_each_shard() -> None:
    ranks = works(plan("column_wise", (0, 100, 4), (1, 100, 4)))
    assert [work.ids_looked_up for work in ranks] == [120, 120, 0, 0]
    assert ranks[2].bytes_in_node == 2 * (30 * 8 + 10 * 4 + 10 * 4 * 4)


def test_data_parallel_reduces_the_table_and_all_of_it_learns() -> None:
    for work in works(plan("data_parallel")):
        assert work.ids_looked_up == 30
        assert work.bytes_reduced == 2 * 3 / 4 * 100 * 8 * 4
        assert work.element_bytes == 15 * 100 * 8 * 4
        assert work.bytes_in_node == 0
        assert work.collectives == 1


def test_nodes() -> None:
    owner, neighbour, *far = works(plan("table_wise", (0, 100, 8)), local_world_size=2)
    vectors = 10 * 8 * 4
    assert (owner.bytes_in_node, owner.bytes_across_nodes) == (vectors, 2 * vectors)
    assert neighbour.bytes_across_nodes == 0
    assert all(work.bytes_in_node == 0 < work.bytes_across_nodes for work in far)
    # Row-wise in a node: each of its ranks sends the node's sums for one rank of the other.
    ranks = works(plan("table_row_wise", (0, 50, 8), (1, 50, 8)), local_world_size=2)
    inputs = 2 * (15 * 8 + 10 * 4)
    assert ranks[0].bytes_across_nodes == vectors
    assert ranks[2].bytes_across_nodes == inputs + vectors


@pytest.mark.parametrize(("local_world_size", "once"), [(1, 1.5), (2, 1.0), (4, 1.5)])
def test_overlapped_gradients_of_dense_layers_cross_a_link_once_a_node(
    local_world_size: int, once: float
) -> None:
    compute = replace(NOTHING, parameter_bytes=800)
    table_wise = plan("table_wise", (0, 100, 8))

    def reduced(*, overlapped: bool) -> set[float]:
        ranks = works(
            table_wise, local_world_size=local_world_size, compute=compute, overlapped=overlapped
        )
        return {work.bytes_reduced for work in ranks}

    assert reduced(overlapped=False) == {1.5 * 800}  # in a ring of 4
    assert reduced(overlapped=True) == {once * 800}


def test_deduplication_divides_everything_that_travels() -> None:
    whole, part = (works(plan("table_wise", (0, 100, 8)), unique=u) for u in (0.0, 0.5))
    unique_rows = 10 - 9 * 0.5
    for before, after in zip(whole, part, strict=True):
        assert after.bytes_in_node == pytest.approx(before.bytes_in_node * unique_rows / 10)
        assert after.bytes_looked_up == pytest.approx(before.bytes_looked_up * unique_rows / 10)


class Hot(TableStrategy):
    """A quarter of the ids of each table go to shards."""

    def sharded_share(self, table: str) -> float:
        return 0.25


def test_ids_that_parts_keep_are_not_sent() -> None:
    whole, quarter = (
        bytes_of_tables(
            [Table("t", ("f",), 100, 8, pooled=False)],
            plan("table_wise", (0, 100, 8)).plan[""],  # type: ignore[arg-type]
            DataProfile({"f": FeatureProfile(3.0)}),
            batch_size=10,
            world_size=4,
            parts=parts,
        )["t"]
        for parts in ((), (Hot(),))
    )
    lengths = 3 * 10 * 4
    assert quarter - lengths == (whole - lengths) / 4

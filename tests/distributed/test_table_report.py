"""Who shards and trains which table of a sharded model."""

from __future__ import annotations

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in.matrix.modules import Bags, bag_configs, processed
from tests.planning.test_planner import prepared, registry
from tests.sharded import bags, sequences, shard, sharded
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugins import describe_tables
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.table_report import (
    DENSE,
    ShardedTables,
    TableLine,
)
from recd_plugins.testing.gloo import run_on_ranks

SGD = "exact_sgd, lr 0.25"
BAGS = "ExactShardedEmbeddingBagCollection bags"
PROCESSED = "ShardedFeatureProcessedEmbeddingBagCollection processed"
OWN = (
    "nobody: module 'own' has the type Bags, a subclass of EmbeddingBagCollection, but "
    "DistributedModelParallel matches types exactly"
)
KINDS = {f"t_b{n}": kind for n, kind in enumerate(["table_wise", "row_wise", "table_wise"])}
KINDS |= {"t_b3": "data_parallel", "t_s": "row_wise", "t_a": "table_wise", "t_b": "table_wise"}


def lines(rank: int, world_size: int) -> tuple[list[TableLine], str]:
    model = nn.ModuleDict(
        {
            "bags": bags("b0", "b1", "b2", "b3", rows=10),
            "sequences": sequences("s", rows=50, dim=8),
            "processed": processed(),
            "own": Bags(tables=bag_configs()),
        }
    )
    apply_optimizer_in_backward(RowWiseAdagrad, model["sequences"].parameters(), {"lr": 0.5})
    ready = prepared(registry(optimizer="sgd"), model)
    report = describe_tables(
        shard(model, build_sharders(ready, fused_params={"learning_rate": 0.25}), KINDS)
    )
    return list(report.lines), str(report)


def of_an_empty_plan(rank: int, world_size: int) -> list[TableLine]:
    model = nn.ModuleDict({"bags": bags("a", "b")})
    dmp = sharded(model, ShardingPlan({}), get_default_sharders())
    return list(describe_tables(dmp).lines)


def with_params(rank: int, world_size: int, params: dict[str, Any]) -> list[str]:
    model = nn.ModuleDict({"bags": bags("a", "b")})
    ready = prepared(registry(optimizer="sgd"), model)
    dmp = shard(model, build_sharders(ready, fused_params=params), "table_wise")
    return [line.optimizer for line in describe_tables(dmp).lines]


def test_every_rank_knows_who_shards_and_trains_every_table() -> None:
    ranks = run_on_ranks(lines, 2)
    adagrad = "exact_row_wise_adagrad, lr 0.5"
    sequence = "ExactShardedEmbeddingCollection sequences"
    for found, _ in ranks:
        assert found == [
            TableLine("t_b0", 10, 4, "table_wise", "fused", SGD, BAGS),
            TableLine("t_b1", 10, 4, "row_wise", "fused", SGD, BAGS),
            TableLine("t_b2", 10, 4, "table_wise", "fused", SGD, BAGS),
            TableLine("t_b3", 10, 4, "data_parallel", "dense", DENSE, BAGS),
            TableLine("t_s", 50, 8, "row_wise", "fused", adagrad, sequence),
            TableLine("t_a", 24, 8, "table_wise", "fused", SGD, PROCESSED),
            TableLine("t_b", 24, 8, "table_wise", "fused", SGD, PROCESSED),
            TableLine("t_a", 24, 8, "", "", DENSE, OWN),
            TableLine("t_b", 24, 8, "", "", DENSE, OWN),
        ]
    text = ranks[0][1].splitlines()
    names = ["tables", "t_b0, t_b2", "t_b1", "t_b3", "t_s", "t_a, t_b", "t_a, t_b"]
    assert [line.split("  ")[0] for line in text] == names
    row = ["t_b0,", "t_b2", "20", "4", "table_wise", "fused", *SGD.split(), *BAGS.split()]
    assert text[1].split() == row


def test_many_alike_tables_are_one_line() -> None:
    alike = [TableLine(f"t_{i}", 1000, 4, "row_wise", "fused", SGD, BAGS) for i in range(26)]
    _, line = str(ShardedTables(tuple(alike))).splitlines()
    assert line.startswith("t_0 ... t_25 (26 tables)  26,000    4  row_wise  fused ")


def test_tables_that_the_plan_forgot_and_optimizers_that_nobody_chose() -> None:
    (found,) = run_on_ranks(of_an_empty_plan, 1)
    assert {line.sharded_by for line in found} == {"nobody: bags is not in the plan"}
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    assert run_on_ranks(with_params, 1, params) == [["exact_adagrad, lr 0.01"] * 2]

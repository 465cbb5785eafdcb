"""A trainer with an optimizer, parameters and codecs of its own keeps them, table by table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in.matrix.modules import Bags, bag_configs, processed
from tests.planning.test_planner import prepared, profile, registry
from tests.sharded import bags, local_weights, sequences, shard, sharded
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders, row_wise, table_wise
from torchrec.distributed.types import CommOp, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import describe_tables
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.sharding.table_report import DENSE, ShardedTables, TableLine
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

FEATURES = [f"f{i}" for i in range(6)]
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-4}


@dataclass(frozen=True)
class Trainer:
    in_backward: bool = False  # tables bring RowWiseAdagrad
    fused_params: dict[str, Any] = field(default_factory=dict)
    codecs: bool = False
    in_base: bool = False  # these are passed in a sharder of TorchRec's
    wire: str = "fp32"


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    sent: int
    kinds: set[str]


def model_of(trainer: Trainer) -> Any:
    torch.manual_seed(0)
    tables = bags(*FEATURES, rows=40, dim=16)
    if trainer.in_backward:
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-4})
    return nn.ModuleDict({"bags": tables})


def both_sides(rank: int, world_size: int, trainer: Trainer) -> tuple[Trained, Trained]:
    codecs: Any = None
    if trainer.codecs:
        config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
        codecs = get_qcomm_codecs_registry(config, device=DEVICE)
    stock = EmbeddingBagCollectionSharder(dict(trainer.fused_params), codecs)
    # A rule that must not be theirs.
    ready = prepared(registry(optimizer="sgd", wire=trainer.wire), model_of(trainer))
    said: Any = {"fused_params": trainer.fused_params, "qcomm_codecs_registry": codecs}
    if trainer.in_base or trainer.wire != "fp32":
        said = {"base": [stock] if trainer.in_base else []}
    ours: Any = build_sharders(ready, **said)
    planner = ready.planner(
        world_size=world_size,
        profile=profile(),
        device=DEVICE,
        replicate=True,
        constraints={"t_f0": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plan = planner.plan(model_of(trainer), ours)
    kinds = {table.sharding_type for module in plan.plan.values() for table in module.values()}
    found = []
    for sharders in (ours, [stock]):
        dmp = sharded(model_of(trainer), plan, sharders)
        with CollectiveBytes() as counter:
            losses = [_step(dmp, rank, step) for step in range(5)]
        found.append(Trained(losses, counter.total, kinds))
    return found[0], found[1]


def _step(dmp: DistributedModelParallel, rank: int, step: int, batch: int = 32) -> float:
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(0, 40, (len(FEATURES) * batch,), generator=generator)
    features = KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones(len(ids), dtype=torch.long))
    vectors = dmp.module["bags"](features.to(DEVICE))
    rows = torch.stack([vectors[feature] for feature in FEATURES])
    loss = (rows.sum(dim=(0, 2)) - 1).square().mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    "trainer",
    [
        Trainer(fused_params=ADAGRAD),
        Trainer(in_backward=True, fused_params={"gradient_clipping": True}, in_base=True),
        Trainer(in_backward=True, codecs=True),
        Trainer(in_backward=True, codecs=True, in_base=True),
        Trainer(in_backward=True, codecs=True, wire="fp16"),
    ],
    ids=["argument", "both", "codecs", "codecs in base", "wire"],
)
def test_a_trainer_keeps_its_optimizer_and_its_codecs(trainer: Trainer) -> None:
    for ours, stock in run_on_ranks(both_sides, 2, trainer):
        assert ours.losses == pytest.approx(stock.losses, abs=1e-6)
        assert ours.losses[-1] != pytest.approx(ours.losses[0], abs=1e-3)
        assert ours.sent == stock.sent
        assert "row_wise" in ours.kinds
        assert not ours.kinds & {"data_parallel", "column_wise", "table_column_wise"}


def tables_that_learn(rank: int, world_size: int, in_base: bool, even: bool) -> list[str]:
    """Tables of which a shard moved in a step, with a trainer's own codecs of bf16.

    Batches of different sizes on the ranks have row-wise sums go by synchronous collectives.
    """
    config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
    # Not get_qcomm_codecs_registry, which takes fp16 for bf16 on CPU.
    codecs: Any = {each.name: get_qcomm_codecs(config) for each in CommOp}
    model = model_of(Trainer())
    ready, base = prepared(registry(), model), EmbeddingBagCollectionSharder(dict(ADAGRAD), codecs)
    ours: Any = build_sharders(ready, fused_params=ADAGRAD, qcomm_codecs_registry=codecs)
    if in_base:
        ours = build_sharders(ready, [base])
    on_rank_0 = {f"t_{name}": table_wise(rank=0, compute_kernel="fused") for name in FEATURES}
    dmp = shard(model, ours, on_rank_0 | {"t_f0": row_wise(compute_kernel="fused")})
    before = local_weights(dmp)
    _step(dmp, rank, 0, 32 if even else 32 + rank)
    after = local_weights(dmp)
    return [n.split(".")[-2] for n in before if not torch.equal(before[n], after[n])]


@pytest.mark.parametrize(
    ("in_base", "even"), [(True, False), (False, True)], ids=["base, uneven", "argument, even"]
)
def test_tables_learn_with_a_trainers_own_bf16(in_base: bool, even: bool) -> None:
    """FBGEMM's decoder of bf16 has no gradient, which synchronous collectives take through it."""
    first, second = run_on_ranks(tables_that_learn, 2, in_base, even)
    assert first == [f"t_{feature}" for feature in FEATURES]
    assert second == ["t_f0"], "the row-wise one; others are on rank 0"


def params_of(*args: Any, **arguments: Any) -> dict[str, Any]:
    sharder: Any = build_sharders(prepared(registry(optimizer="sgd")), *args, **arguments)[0]
    return sharder.fused_params


def test_fused_params_go_before_those_of_training() -> None:
    of_training = fused_params(registry(optimizer="sgd").training)
    assert params_of() == of_training
    assert params_of(fused_params={"learning_rate": 7.0}) == of_training | {"learning_rate": 7.0}
    # Another optimizer takes nothing from that of training.
    adam = {"optimizer": EmbOptimType.ADAM}
    assert params_of(fused_params=adam) == adam
    assert params_of([EmbeddingBagCollectionSharder(adam)]) == adam
    both = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder(adam)]
    assert params_of(both) == of_training


def test_index_dedup_of_a_trainer_stays() -> None:
    base: Any = [EmbeddingCollectionSharder(use_index_dedup=True)]
    sharders: Any = build_sharders(prepared(registry()), base)
    assert sharders[0]._use_index_dedup


class OwnSharder(EmbeddingBagCollectionSharder):
    pass


@pytest.mark.parametrize(
    ("base", "arguments", "message"),
    [
        ([OwnSharder()], {}, "'base' contains a sharder of type OwnSharder"),
        (
            [EmbeddingCollectionSharder(qcomm_codecs_registry={"a": None})],  # type: ignore[dict-item]
            {"qcomm_codecs_registry": {"b": None}},
            r"'qcomm_codecs_registry' is set both in sharders\(\) and on the Embedding",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(base: Any, arguments: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        build_sharders(prepared(registry()), base, **arguments)


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
    sharders = build_sharders(ready, fused_params={"learning_rate": 0.25})
    report = describe_tables(shard(model, sharders, KINDS))
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

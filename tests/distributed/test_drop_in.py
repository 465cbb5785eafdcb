from __future__ import annotations

from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.distributed import drop_in_cases as cases
from tests.distributed.drop_in_cases import ADAGRAD, Trainer
from tests.planning.test_planner import prepared, registry
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.testing.gloo import run_on_ranks


@pytest.mark.parametrize(
    "trainer",
    [
        Trainer(in_backward=True),
        Trainer(fused_params=ADAGRAD),
        Trainer(fused_params=ADAGRAD, in_base=True),
        Trainer(in_backward=True, fused_params={"gradient_clipping": True}, in_base=True),
        Trainer(in_backward=True, codecs=True),
        Trainer(in_backward=True, codecs=True, in_base=True),
        Trainer(in_backward=True, codecs=True, wire="fp16"),
    ],
    ids=["in backward", "argument", "base", "both", "codecs", "codecs in base", "wire"],
)
def test_a_trainer_keeps_its_optimizer_and_its_codecs(trainer: Trainer) -> None:
    for ours, stock in run_on_ranks(cases.both_sides, 2, trainer):
        assert ours.losses == pytest.approx(stock.losses, abs=1e-6)
        assert ours.losses[-1] != pytest.approx(ours.losses[0], abs=1e-3)
        assert ours.sent == stock.sent
        assert "row_wise" in ours.kinds
        assert not ours.kinds & {"data_parallel", "column_wise", "table_column_wise"}


@pytest.mark.parametrize(
    ("in_base", "even"), [(True, False), (False, True)], ids=["base, uneven", "argument, even"]
)
def test_tables_learn_with_a_trainers_own_bf16(in_base: bool, even: bool) -> None:
    """FBGEMM's decoder of bf16 has no gradient, which synchronous collectives take through it."""
    first, second = run_on_ranks(cases.tables_that_learn, 2, in_base, even)
    assert first == [f"t_{feature}" for feature in cases.FEATURES]
    assert second == ["t_f0"], "the row-wise one; others are on rank 0"


def test_codecs_send_fewer_bytes() -> None:
    quantised, plain = (
        run_on_ranks(cases.both_sides, 2, Trainer(in_backward=True, codecs=codecs))[0][0].sent
        for codecs in (True, False)
    )
    assert quantised < 0.75 * plain


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
    sharders: Any = build_sharders(
        prepared(registry()), [EmbeddingCollectionSharder(use_index_dedup=True)]
    )
    assert sharders[0]._use_index_dedup


class OwnSharder(EmbeddingBagCollectionSharder):
    pass


@pytest.mark.parametrize(
    ("base", "arguments", "message"),
    [
        ([OwnSharder()], {}, "base has a OwnSharder, and only TorchRec"),
        (
            [EmbeddingBagCollectionSharder({"learning_rate": 1.0})],
            {"fused_params": {"learning_rate": 1.0}},
            r"fused_params is an argument of sharders\(\) and of a sharder in base",
        ),
        (
            [EmbeddingCollectionSharder(qcomm_codecs_registry={"a": None})],  # type: ignore[dict-item]
            {"qcomm_codecs_registry": {"b": None}},
            r"qcomm_codecs_registry is an argument of sharders\(\) and of a sharder",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(base: Any, arguments: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        build_sharders(prepared(registry()), base, **arguments)


def test_a_plan_that_drops_an_optimizer_brings_a_warning() -> None:
    assert run_on_ranks(cases.warnings_of_a_replicating_plan, 1) == [
        [
            "data-parallel tables lose the optimizer of their backward pass (RowWiseAdagrad) and "
            "train with the dense optimizer, if at all: t_f0, t_f1, t_f2, t_f3, t_f4, t_f5"
        ]
    ]

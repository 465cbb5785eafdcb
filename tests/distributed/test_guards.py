"""What goes wrong with TorchRec alone, what is mended, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.distributed import guard_cases as cases
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)

from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.launch import RankError
from recd_plugins.sharding.bags import ExactShardedEmbeddingBagCollection
from recd_plugins.sharding.batch_form import BatchForm
from recd_plugins.sharding.guards import check_every_parameter_is_trained, guard
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)
from recd_plugins.testing.gloo import run_on_ranks

STOCK, EXACT = True, False


def _run(case: Callable[..., Any], stock: bool) -> Any:
    return run_on_ranks(case, 2, stock)


def test_deduplicated_sequences_would_lose_their_gradient() -> None:
    assert _run(cases.deduplicated_sequences, STOCK) == [0.0, 0.0]  # no error, nothing learnt
    learnt = _run(cases.plain_sequences, EXACT)
    assert min(learnt) > 0.1
    assert _run(cases.deduplicated_sequences, EXACT) == learnt


def test_deduplicated_bags_of_dense_kernels_are_those_of_all_rows() -> None:
    for stored_once, every_row in _run(cases.deduplicated_replicated_bags, EXACT):
        torch.testing.assert_close(stored_once, every_row, atol=0, rtol=0)
        assert len(every_row) == 3


def test_data_parallel_sequences_are_not_pooled() -> None:
    with pytest.raises(RankError, match="split_sizes"):
        _run(cases.replicated_sequences, STOCK)
    assert _run(cases.replicated_sequences, EXACT) == [[5, cases.DIM]] * 2


def test_row_wise_bags_take_deduplicated_batches() -> None:
    with pytest.raises(RankError, match="invalid tensor size"):
        _run(cases.deduplicated_row_wise_bags, STOCK)
    assert min(_run(cases.deduplicated_row_wise_bags, EXACT)) > 0.1


def test_sums_next_to_row_wise_means_are_not_divided() -> None:
    assert min(_run(cases.sum_next_to_row_wise_mean, STOCK)) > 0.1
    assert max(_run(cases.sum_next_to_row_wise_mean, EXACT)) < 1e-6


def test_weighted_means_are_refused_as_no_two_kinds_of_them_agree() -> None:
    (divided, gradient_divided), _ = _run(cases.weighted_mean_table_wise, STOCK)
    assert (divided, gradient_divided) == pytest.approx((2, 1)), "FBGEMM: the gradient is not"
    assert _run(cases.weighted_mean_row_wise, STOCK) == pytest.approx([2.5, 2.5])
    for case in (cases.weighted_mean_table_wise, cases.weighted_mean_row_wise):
        with pytest.raises(ExactnessError, match="tables a have mean pooling of weighted ids"):
            _run(case, EXACT)


@pytest.mark.parametrize(
    ("kind", "coalesced", "fused"),
    [
        *product((ShardingType.TABLE_WISE, ShardingType.ROW_WISE), ((), ("a",)), (False,)),
        (ShardingType.TABLE_WISE, (), True),  # by rows it is refused as it is sharded
    ],
)
def test_means_of_batches_with_weights_are_refused(
    kind: ShardingType, coalesced: tuple[str, ...], fused: bool
) -> None:
    with pytest.raises(ExactnessError, match=r"tables a have mean pooling of weighted ids"):
        run_on_ranks(cases.mean_of_a_weighted_batch, 2, kind, coalesced, fused)


def test_weights_whose_gradient_would_be_lost_are_refused() -> None:
    assert _run(cases.weights_that_learn, STOCK) == [None, None]
    with pytest.raises(ExactnessError, match="the weights of a require a gradient"):
        _run(cases.weights_that_learn, EXACT)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (cases.sequences_under_sync_collectives, ExactnessError, "synchronous collectives"),
        (cases.variable_bags_of_no_rows_known, ExactnessError, "only one of stride_per_key"),
        (cases.bags_with_inverse_indices_only, ExactnessError, "only one of stride_per_key"),
        (cases.mean_and_sum_of_one_feature, ExactnessError, "features f look up a row-wise table"),
        (cases.untrained_table, ExactnessError, "no optimizer updates embedding_bags.a.weight"),
    ],
)
def test_refused(case: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _run(case, EXACT)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_features_may_come_in_another_order(kind: str) -> None:
    assert min(run_on_ranks(cases.features_in_another_order, 2, kind, STOCK)) > 0.1  # not a word
    assert max(run_on_ranks(cases.features_in_another_order, 2, kind, EXACT)) == 0


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_feature_that_is_missing_is_named(kind: str) -> None:
    with pytest.raises(ExactnessError, match="the batch has no feature b, which tables here look"):
        run_on_ranks(cases.missing_feature, 2, kind)


@pytest.mark.parametrize("coalesced", [False, True], ids=["", "coalesced"])
@pytest.mark.parametrize("form", ["plain", "deduplicated"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_batch_may_have_no_rows(kind: str, form: str, coalesced: bool) -> None:
    found = run_on_ranks(cases.no_rows, 2, kind, form == "deduplicated", coalesced)
    row = [2 * cases.DIM] if kind == "bags" else []
    for rank, (some, none, moved) in enumerate(found):
        assert some == [0 if rank else 3, *row]
        assert none == [0, *row]
        assert moved > 0.1


def test_unsharded_sequences_refuse_inverse_indices_under_guard() -> None:
    model = nn.ModuleDict({"ec": cases.sequences("a")})
    model["ec"](cases.vbe("a"))  # goes through, with the inverse indices ignored
    guard(model)
    with pytest.raises(ExactnessError, match="deduplicated KeyedJaggedTensor"):
        model["ec"](cases.vbe("a"))
    with pytest.raises(ExactnessError, match="deduplicated KeyedJaggedTensor"):
        model["ec"](features=cases.vbe("a"))
    assert model["ec"](cases.plain("a"))["a"].values().shape == (5, cases.DIM)


def test_every_parameter_of_a_plain_model() -> None:
    model = nn.Linear(2, 1)
    check_every_parameter_is_trained(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ExactnessError, match=r"no optimizer updates bias:"):
        check_every_parameter_is_trained(model, torch.optim.SGD([model.weight], lr=1.0))


def test_sharding_types() -> None:
    bags = ExactEmbeddingBagCollectionSharder().sharding_types("cpu")
    assert {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value} <= set(bags)
    assert len(bags) == len(set(bags))
    assert ShardingType.ROW_WISE.value in ExactEmbeddingCollectionSharder().sharding_types("cpu")


def test_a_plan_does_not_change_while_a_model_trains() -> None:
    sharded = object.__new__(ExactShardedEmbeddingBagCollection)
    vars(sharded).update(form=BatchForm("sparse"))
    changed = EmbeddingModuleShardingPlan({"a": ParameterSharding("table_wise", "fused", [0])})
    with pytest.raises(SetupError, match=r"^sparse is sharded exactly, .*\.reshard would"):
        ExactEmbeddingBagCollectionSharder().reshard(sharded, changed, ShardingEnv(1, 0))

"""What goes wrong with TorchRec alone, what is mended, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded import CPU, SGD, bags, exact_sharders, local_weights, sequences, shard
from torch import Tensor, nn
from torchrec.distributed import comm_ops
from torchrec.distributed.sharding_plan import table_row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.mean_pooling import divide_row_wise_tables_only
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.sharding.batch_form import BatchForm
from recd_plugins.sharding.exact_modules import ExactShardedEmbeddingBagCollection
from recd_plugins.sharding.guards import guard
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder, stock_sharders
from recd_plugins.testing.gloo import run_on_ranks

STOCK, EXACT = True, False
DIM = 4


def sharded(module: nn.Module, places: Any, stock: bool, coalesced: Iterable[str] = ()) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    sharders = stock_sharders(SGD) if stock else exact_sharders(SGD, coalesced)
    return shard(module, sharders, places, CPU)


def vbe(*names: str) -> KeyedJaggedTensor:
    """Two unique rows ([0, 1] and [2]) of each feature, for three rows."""
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.tensor([0, 1, 2] * len(names)),
        lengths=torch.tensor([2, 1] * len(names)),
        stride_per_key_per_rank=[[2]] * len(names),
        inverse_indices=(list(names), torch.tensor([[0, 1, 0]] * len(names))),
    )


def plain(*names: str, **more: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.tensor([0, 1, 2, 0, 1] * len(names)),
        lengths=torch.tensor([2, 1, 2] * len(names)),
        **more,
    )


def weighted(weights: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor([0, 1]), weights, lengths=torch.tensor([2, 0]))


def moved(dmp: Any, features: KeyedJaggedTensor) -> float:
    before = local_weights(dmp)
    output = dmp(features).wait()
    (output["a"] if isinstance(output, dict) else output).values().square().sum().backward()
    after = local_weights(dmp)
    apart = [(after[name] - before[name]).abs() for name in before if before[name].numel()]
    most = torch.tensor(max((float(each.max()) for each in apart), default=0.0))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def moved_sequences(rank: int, world_size: int, stock: bool, batch: Any = plain) -> float:
    return moved(sharded(sequences("a"), "table_wise", stock), batch("a"))


def sequences_under_sync_collectives(rank: int, world_size: int, stock: bool) -> float:
    with comm_ops.torchrec_use_sync_collectives():
        return moved_sequences(rank, world_size, stock)


def mean_of_a_weighted_batch(
    rank: int, world_size: int, place: str, coalesced: Iterable[str], kind: str
) -> None:
    module: nn.Module = bags("a", means="a", weighted=kind == "weighted")
    if kind == "fused":
        configs = bags("a", means="a").embedding_bag_configs()
        module = FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 1.0})
    dmp = sharded(module, place, EXACT, coalesced)
    features = weighted(torch.tensor([0.5, 2.0]))
    dmp(KeyedJaggedTensor(["a"], features.values(), lengths=features.lengths()))["a"].sum()
    dmp(features)


def weights_that_learn(rank: int, world_size: int, stock: bool) -> Tensor | None:
    weights = torch.tensor([0.5, 2.0], requires_grad=True)
    dmp = sharded(bags("a", weighted=True), "table_wise", stock)
    dmp(weighted(weights))["a"].sum().backward()
    return weights.grad


def variable_bags_of_no_rows_known(rank: int, world_size: int, stock: bool) -> None:
    dmp = sharded(bags("a"), table_wise(0, compute_kernel="dense"), stock)
    ids, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 1])
    dmp(KeyedJaggedTensor(["a"], ids, lengths=lengths, stride_per_key_per_rank=[[2]])).values()


def bags_with_inverse_indices_only(rank: int, world_size: int, stock: bool) -> None:
    inverse = (["a"], torch.tensor([[0, 1, 0]]))
    sharded(bags("a"), table_wise(rank=0), stock)(plain("a", inverse_indices=inverse))


def mean_and_sum_of_one_feature(rank: int, world_size: int, stock: bool) -> None:
    tables = bags("a", "b", means="b", feature_names=["f"]).embedding_bag_configs()
    tables[1].pooling = PoolingType.MEAN
    sharded(EmbeddingBagCollection(tables), "row_wise", stock)


def untrained_table(rank: int, world_size: int, stock: bool) -> None:
    dmp = sharded(bags("a"), table_row_wise(host_index=0), stock)
    build_train_pipeline(dmp, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), CPU)


def features_in_another_order(rank: int, world_size: int, stock: bool, kind: Any) -> float:
    dmp, found = sharded(kind("a", "b"), "table_wise", stock), []
    for names, ids in (("ab", [1, 2]), ("ba", [2, 1])):
        features = KeyedJaggedTensor([*names], torch.tensor(ids), lengths=torch.ones(2).int())
        of_a = dmp(features).wait()["a"]
        found.append(of_a if isinstance(of_a, Tensor) else of_a.values())
    return float((found[0] - found[1]).abs().max())


def missing_feature(rank: int, world_size: int, stock: bool, kind: Any) -> None:
    sharded(kind("a", "b"), "table_wise", stock)(plain("a"))


def no_rows(
    rank: int, world_size: int, kind: Any, deduplicated: bool, coalesced: bool
) -> tuple[list[int], list[int], float]:
    module = bags("a", "b", means="a") if kind is bags else kind("a", "b")
    places = {"t_a": "row_wise", "t_b": "table_wise"}
    dmp = sharded(module, places, EXACT, places if coalesced else ())
    names, none = ["a", "b"], torch.zeros(0, dtype=torch.long)
    some, of_rows = plain(*names), dict[str, Any](stride=0)
    if deduplicated:
        some, inverse = vbe(*names), (names, none.view(2, 0))
        of_rows = {"stride_per_key_per_rank": [[0], [0]], "inverse_indices": inverse}
    empty = KeyedJaggedTensor(names, none, lengths=none, **of_rows)
    learnt = moved(dmp, empty if rank else some)
    shapes = []
    for batch in (empty if rank else some, empty):
        out = dmp(batch)
        values = out.values() if kind is bags else out["a"].values()
        values.sum().backward()
        shapes.append(list((values if kind is bags else out["a"].lengths()).shape))
    return shapes[0], shapes[1], learnt


def _run(case: Callable[..., Any], stock: bool, *more: Any) -> Any:
    return run_on_ranks(case, 2, stock, *more)


def test_deduplicated_sequences_would_lose_their_gradient() -> None:
    assert _run(moved_sequences, STOCK, vbe) == [0.0, 0.0]  # no error, nothing learnt
    learnt = _run(moved_sequences, EXACT)
    assert min(learnt) > 0.1
    assert _run(moved_sequences, EXACT, vbe) == learnt


@pytest.mark.parametrize(
    ("place", "coalesced", "kind"),
    [
        ("table_wise", ("t_a",), "bags"),
        ("row_wise", (), "bags"),
        ("row_wise", (), "weighted"),
        ("table_wise", (), "fused"),  # by rows it is refused as it is sharded
    ],
)
def test_means_of_batches_with_weights_are_refused(
    place: str, coalesced: tuple[str, ...], kind: str
) -> None:
    with pytest.raises(ExactnessError, match="tables 't_a' use mean pooling with weighted ids"):
        run_on_ranks(mean_of_a_weighted_batch, 2, place, coalesced, kind)


def test_weights_whose_gradient_would_be_lost_are_refused() -> None:
    assert _run(weights_that_learn, STOCK) == [None, None]
    with pytest.raises(ExactnessError, match="the weights of the features 'a' require a gradient"):
        _run(weights_that_learn, EXACT)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (sequences_under_sync_collectives, "synchronous collectives"),
        (variable_bags_of_no_rows_known, "only one of stride_per_key"),
        (bags_with_inverse_indices_only, "only one of stride_per_key"),
        (mean_and_sum_of_one_feature, "features 'f' look up a row-wise table"),
        (untrained_table, "no optimizer updates the parameters 'embedding_bags.t_a.weight"),
    ],
)
def test_refused(case: Callable[..., Any], message: str) -> None:
    with pytest.raises(ExactnessError, match=message):
        _run(case, EXACT)


@pytest.mark.parametrize("kind", [bags, sequences])
def test_features_may_come_in_another_order_and_may_not_be_missing(kind: Any) -> None:
    assert min(_run(features_in_another_order, STOCK, kind)) > 0.1  # not a word
    assert max(_run(features_in_another_order, EXACT, kind)) == 0
    with pytest.raises(ExactnessError, match="the batch lacks the features 'b'"):
        _run(missing_feature, EXACT, kind)


@pytest.mark.parametrize("coalesced", [False, True], ids=["", "coalesced"])
@pytest.mark.parametrize("deduplicated", [False, True], ids=["plain", "deduplicated"])
@pytest.mark.parametrize("kind", [bags, sequences])
def test_a_batch_may_have_no_rows(kind: Any, deduplicated: bool, coalesced: bool) -> None:
    found = run_on_ranks(no_rows, 2, kind, deduplicated, coalesced)
    row = [2 * DIM] if kind is bags else []
    for rank, (some, none, learnt) in enumerate(found):
        assert some == [0 if rank else 3, *row]
        assert none == [0, *row]
        assert learnt > 0.1


def test_unsharded_sequences_refuse_inverse_indices_under_guard() -> None:
    model = nn.ModuleDict({"ec": sequences("a")})
    model["ec"](vbe("a"))  # goes through, with the inverse indices ignored
    guard(model)
    for call in (lambda: model["ec"](vbe("a")), lambda: model["ec"](features=vbe("a"))):
        with pytest.raises(ExactnessError, match="deduplicated KeyedJaggedTensor"):
            call()
    assert model["ec"](plain("a"))["a"].values().shape == (5, DIM)


@pytest.mark.parametrize("coalesced", [(), ("t_b",)])
def test_means_in_grids_are_refused(coalesced: tuple[str, ...]) -> None:
    grid = ParameterSharding("grid_shard", "fused", [0])
    sharder, plan = ExactEmbeddingBagCollectionSharder(coalesced=coalesced), {"t_a": grid}
    with pytest.raises(ExactnessError, match=r"^tables 't_b' use mean pooling .* grid_shard"):
        sharder.shard(bags("a", "b", means="b"), plan | {"t_b": grid}, ShardingEnv(1, 0))


def test_names_that_torchrec_takes_for_others() -> None:
    (config,) = bags("a", means="a", feature_names=["a", "a@7d"]).embedding_bag_configs()
    row_wise = {"t_a": ParameterSharding("row_wise", "fused", [0])}
    with pytest.raises(SetupError, match=r"names 'a@7d' contain '@', .* mean pooling"):
        divide_row_wise_tables_only(None, [config], row_wise)  # type: ignore[arg-type]


def test_a_plan_does_not_change_while_a_model_trains() -> None:
    sharded = object.__new__(ExactShardedEmbeddingBagCollection)
    vars(sharded).update(form=BatchForm("sparse"))
    changed = EmbeddingModuleShardingPlan({"a": ParameterSharding("table_wise", "fused", [0])})
    with pytest.raises(SetupError, match=r"^module 'sparse': .*\.reshard is not"):
        ExactEmbeddingBagCollectionSharder().reshard(sharded, changed, ShardingEnv(1, 0))

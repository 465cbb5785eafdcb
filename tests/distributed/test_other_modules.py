"""Modules that TorchRec's own sharders take: which sharder each gets, and what is refused."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in.matrix.modules import FEATURES, managed, mch, processed
from tests.drop_in.matrix.modules import MODULES as MADE
from tests.planning.test_planner import prepared, registry
from tests.sharded import bags, plan_of, shard, sharded
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
)
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.drop_in.dedup import PooledFeatures
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.other_sharders import why_plain
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

EXACT = {
    "EmbeddingBagCollectionSharder": "ExactEmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder": "ExactEmbeddingCollectionSharder",
}
DEFAULT = {sharder.module_type: sharder for sharder in get_default_sharders()}


def test_every_default_sharder_of_torchrec_is_there() -> None:
    ours = {sharder.module_type: sharder for sharder in build_sharders(prepared(registry()))}
    assert ours.keys() == DEFAULT.keys()
    for module_type, sharder in ours.items():
        name = type(DEFAULT[module_type]).__name__
        assert type(sharder).__name__ == EXACT.get(name, name)


@pytest.mark.skipif(
    find_spec("torchrec.distributed.pec_embedding") is None, reason="TorchRec 1.8 has it"
)
def test_prioritized_sequences_are_looked_up_as_they_come() -> None:
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    model = PECEmbeddingCollection(MADE["EmbeddingCollection"].build())
    assert PooledFeatures.of(list(embedding_modules(model))).others.keys() == {"a", "b"}


def rows_of(model: Any, features: KeyedJaggedTensor) -> torch.Tensor:
    found = model.sparse(features)[0]
    return torch.cat([found[feature] for feature in FEATURES], dim=1)


def sharded_inside(rank: int, world_size: int) -> tuple[int, str]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"sparse": managed(partial(mch, interval=1)), "top": nn.Linear(16, 1)})
    sharders = prepared(registry(), model).sharders()[:2]
    inside: Any = model["sparse"]
    plan = plan_of(inside._embedding_module, "table_wise", sharders[0], world_size, world_size)
    dmp = sharded(model, ShardingPlan({"sparse._embedding_module": plan}), sharders)
    for step in range(3):
        ids = (torch.arange(4) + 10 * step + 3 * rank).repeat(2)
        features = KeyedJaggedTensor(FEATURES, ids, lengths=torch.tensor([3, 1] * 2))
        rows_of(dmp.module, features.to(DEVICE)).square().mean().backward()
    dmp.eval()
    raw = torch.arange(100).repeat(2)
    with torch.no_grad():
        features = KeyedJaggedTensor(FEATURES, raw, lengths=torch.ones_like(raw))
        rows = rows_of(dmp.module, features.to(DEVICE))
    other = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(other, rows)
    differ = int((other[0] != other[1]).any(dim=1).sum())
    with pytest.raises(ExactnessError) as caught:
        build_train_pipeline(dmp, torch.optim.SGD(model["top"].parameters()), DEVICE)
    return differ, str(caught.value)


def test_a_module_of_which_only_the_tables_are_sharded_is_refused() -> None:
    for differ, text in run_on_ranks(sharded_inside, 2):
        assert differ > 0  # a collision map of its own on each rank
        assert text.startswith("module 'sparse' is a ManagedCollisionEmbeddingBagCollection, but")


def test_sharders_of_a_trainer_go_before_torchrecs() -> None:
    kind = FeatureProcessedEmbeddingBagCollectionSharder
    mine = kind(EmbeddingBagCollectionSharder({"learning_rate": 0.5}))
    sharders: list[Any] = build_sharders(prepared(registry()), [mine])
    (found,) = (sharder for sharder in sharders if isinstance(sharder, kind))
    assert found.fused_params == {"learning_rate": 0.5}
    # Inside it is exact, as deduplicated batches need.
    assert type(found._ebc_sharder) is ExactEmbeddingBagCollectionSharder
    assert type(mine._ebc_sharder) is EmbeddingBagCollectionSharder


def test_torchrecs_sharders_in_base_take_what_was_said() -> None:
    ready, said = prepared(registry(wire="fp16")), {"learning_rate": 0.5}
    without_base = {each.module_type: each for each in build_sharders(ready, fused_params=said)}
    for sharder in build_sharders(ready, get_default_sharders(), fused_params=said):
        if not type(sharder).__name__.startswith("Quant"):  # those of inference
            for found, expected in zip(
                inside_of(sharder), inside_of(without_base[sharder.module_type]), strict=True
            ):
                assert type(found) is type(expected)
                assert found.fused_params == expected.fused_params
                assert found.qcomm_codecs_registry.keys() == expected.qcomm_codecs_registry.keys()


def inside_of(sharder: Any) -> list[Any]:
    names = ("_ebc_sharder", "_e_sharder", "_embedding_collection_sharder")
    return [sharder, *(getattr(sharder, name) for name in names if hasattr(sharder, name))]


CODECS = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))


@pytest.mark.parametrize(
    ("inside", "wire", "message"),
    [
        (
            FeatureProcessedEmbeddingBagCollectionSharder(
                EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})
            ),
            "fp32",
            "optimizer is sgd, but the fused_params of a sharder also set",
        ),
        (
            FusedEmbeddingBagCollectionSharder(qcomm_codecs_registry=CODECS),
            "fp16",
            r"training.wire is 'fp16', but the sharders also have a qcomm_",
        ),
    ],
    ids=["optimizer", "codecs"],
)
def test_what_a_trainers_sharder_and_the_file_both_say_is_refused(
    inside: Any, wire: str, message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        build_sharders(prepared(registry(wire=wire)), [inside], defaults={"learning_rate": 0.1})


@pytest.mark.parametrize("by_dict", [True, False])
def test_processors_that_may_see_more_than_a_row_get_all_rows(by_dict: bool) -> None:
    class Mine(PositionWeightedModule if by_dict else PositionWeightedModuleCollection):  # type: ignore[misc]
        pass

    module: Any = processed(by_dict)
    assert why_plain(module) == ""
    if by_dict:
        module._feature_processors["a"] = Mine(4)
    else:
        module._feature_processors = Mine({"a": 4, "b": 4})
    assert "feature processors Mine" in why_plain(module)


def weights_after_processors(rank: int, world_size: int) -> tuple[bool, bool]:
    model = nn.ModuleDict({"sparse": processed()})
    dmp: Any = shard(model, prepared(registry(), model).sharders(), "row_wise")
    features = KeyedJaggedTensor(FEATURES, torch.arange(4), lengths=torch.ones(4).int()).to(DEVICE)
    dmp.module["sparse"](features)
    (sent,), _ = dmp.module["sparse"].preprocess_input([features], {})  # as train pipelines do
    return features.weights_or_none() is not None, sent.weights_or_none() is not None


def test_processors_leave_a_batch_without_weights_to_the_modules_after_them() -> None:
    assert run_on_ranks(weights_after_processors, 1) == [(False, True)]


def fused(means: str = "", **arguments: Any) -> Any:
    tables = bags(*FEATURES, means=means).embedding_bag_configs()
    return FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.02, **arguments})


def sharder_of(module: nn.Module) -> Any:
    of_type = {each.module_type: each for each in build_sharders(prepared(registry()))}
    return of_type[type(module)]


def placed(kind_of_a: str = "table_wise") -> Any:
    kinds = {"t_a": kind_of_a, "t_b": "table_wise"}
    places = {name: ParameterSharding(kind, "fused", [0]) for name, kind in kinds.items()}
    return EmbeddingModuleShardingPlan(places)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_means_of_fused_bags_by_rows_are_refused(device: str) -> None:
    module, places = fused(means="a"), placed("row_wise")
    with pytest.raises(SetupError, match=r"tables 't_a' .* divides wrongly"):
        sharder_of(module).shard(module, places, ShardingEnv(1, 0), torch.device(device))


@pytest.mark.parametrize(
    "kind",
    [
        "EmbeddingBagCollection",
        "EmbeddingCollection",
        "FusedEmbeddingBagCollection",
        "ManagedCollisionEmbeddingBagCollection",
    ],
)
def test_sharding_in_two_dimensions_is_refused(kind: str) -> None:
    module, places = MADE[kind].build(), placed()
    env = object.__new__(ShardingEnv2D)
    env.world_size = 2
    with pytest.raises(SetupError, match=r"^module 'sparse' is sharded by DMPCollection"):
        sharder_of(module).shard(module, places, env, DEVICE, "sparse")


def test_arguments_of_fused_bags_that_do_nothing_are_refused() -> None:
    module, places = fused(momentum=0.9), placed()
    with pytest.raises(SetupError, match=r"^table 't_a': FBGEMM's exact_sgd kernels ignore"):
        sharder_of(module).shard(module, places, ShardingEnv(1, 0), torch.device("cpu"), "sparse")

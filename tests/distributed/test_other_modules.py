from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.distributed import other_module_cases as cases
from tests.planning.test_planner import prepared, registry
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
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from recd_plugins.drop_in.dedup import PooledFeatures
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.other_sharders import why_plain
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder
from recd_plugins.testing.gloo import run_on_ranks

# How each module type of TorchRec's default sharders is tested. A type that is not here, of another
# TorchRec, is to be decided.
DECIDED = {
    "EmbeddingBagCollection": "bags",
    "EmbeddingCollection": "sequences",
    "FeatureProcessedEmbeddingBagCollection": "processed",
    "FusedEmbeddingBagCollection": "fused bags",
    "ManagedCollisionEmbeddingBagCollection": "managed bags",
    "ManagedCollisionEmbeddingCollection": "managed sequences",
    "PECEmbeddingCollection": "prioritized sequences",  # TorchRec 1.9
    # Of inference: TorchRec's sharder as it is.
    "EmbeddingBagCollection of quant": "",
    "EmbeddingCollection of quant": "",
    "QuantManagedCollisionEmbeddingCollection": "",
}
EXACT = {
    "EmbeddingBagCollectionSharder": "ExactEmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder": "ExactEmbeddingCollectionSharder",
}


def name_of(module_type: type[nn.Module]) -> str:
    quantised = module_type.__module__ == "torchrec.quant.embedding_modules"
    is_plain = module_type.__name__ in ("EmbeddingBagCollection", "EmbeddingCollection")
    return f"{module_type.__name__} of quant" if quantised and is_plain else module_type.__name__


DEFAULT = {sharder.module_type: sharder for sharder in get_default_sharders()}


def test_every_default_sharder_of_torchrec_is_decided_and_there() -> None:
    assert {name_of(module_type) for module_type in DEFAULT} <= set(DECIDED)
    ours = {sharder.module_type: sharder for sharder in build_sharders(prepared(registry()))}
    assert ours.keys() == DEFAULT.keys()
    for module_type, sharder in ours.items():
        name = type(DEFAULT[module_type]).__name__
        assert type(sharder).__name__ == EXACT.get(name, name)


@pytest.mark.skipif(
    find_spec("torchrec.distributed.pec_embedding") is None, reason="TorchRec 1.8 has it"
)
def test_prioritized_sequences_are_looked_up_as_they_come() -> None:
    model = cases.Model("prioritized sequences")
    assert PooledFeatures.of(model).others.keys() == {"a", "b"}


def test_a_module_of_which_only_the_tables_are_sharded_is_refused() -> None:
    for differ, text in run_on_ranks(cases.sharded_inside, 2, "managed bags"):
        assert differ > 0  # a collision map of its own on each rank
        assert text.startswith("sparse is a ManagedCollisionEmbeddingBagCollection, and only the ")


def test_sharders_of_a_trainer_go_before_torchrecs() -> None:
    mine = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder({"learning_rate": 0.5})
    )
    found: Any = next(
        sharder
        for sharder in build_sharders(prepared(registry()), [mine])
        if isinstance(sharder, FeatureProcessedEmbeddingBagCollectionSharder)
    )
    assert found.fused_params == {"learning_rate": 0.5}
    # Inside it is exact, as deduplicated batches need.
    assert type(found._ebc_sharder) is ExactEmbeddingBagCollectionSharder
    assert type(mine._ebc_sharder) is EmbeddingBagCollectionSharder


def test_torchrecs_sharders_in_base_take_what_was_said() -> None:
    ready, said = prepared(registry(wire="fp16")), {"learning_rate": 0.5}
    without_base = {each.module_type: each for each in build_sharders(ready, fused_params=said)}
    for sharder in build_sharders(ready, get_default_sharders(), fused_params=said):
        if DECIDED[name_of(sharder.module_type)]:
            for found, expected in zip(
                inside_of(sharder), inside_of(without_base[sharder.module_type]), strict=True
            ):
                assert type(found) is type(expected)
                assert found.fused_params == expected.fused_params
                assert found.qcomm_codecs_registry.keys() == expected.qcomm_codecs_registry.keys()


def inside_of(sharder: Any) -> list[Any]:
    """A sharder, and the one of what is inside."""
    names = ("_ebc_sharder", "_e_sharder", "_embedding_collection_sharder")
    return [sharder, *(getattr(sharder, name) for name in names if hasattr(sharder, name))]


def test_an_optimizer_inside_and_one_of_the_file_are_refused() -> None:
    mine = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})
    )
    with pytest.raises(SetupError, match="optimizer: sgd, and the trainer's fused_params name"):
        build_sharders(prepared(registry()), [mine], defaults={"learning_rate": 0.1})


def test_codecs_inside_and_those_of_the_file_are_refused() -> None:
    codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    mine = FusedEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    with pytest.raises(SetupError, match=r"training.wire is fp16, and the sharders have a qcomm_"):
        build_sharders(prepared(registry(wire="fp16")), [mine])


def test_processors_that_may_see_more_than_a_row_get_all_rows() -> None:
    class Mine(PositionWeightedModule):
        pass

    module: Any = cases.build("processed by a dict")
    assert why_plain(module) == ""
    module._feature_processors["a"] = Mine(4)
    assert why_plain(module) == "as its feature processors Mine may look at more than one row"


def test_processors_leave_a_batch_without_weights_to_the_modules_after_them() -> None:
    assert run_on_ranks(cases.weights_after_processors, 1) == [(False, True)]


def test_a_collection_of_a_trainers_own_gets_all_rows() -> None:
    class Mine(PositionWeightedModuleCollection):
        pass

    module: Any = cases.build("processed")
    assert why_plain(module) == ""
    module._feature_processors = Mine({"a": 4, "b": 4})
    assert why_plain(module) == "as its feature processors Mine may look at more than one row"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_means_of_fused_bags_by_rows_are_refused(device: str) -> None:
    module = FusedEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{index}",
                embedding_dim=4,
                num_embeddings=8,
                feature_names=[f"f{index}"],
                pooling=pooling,
            )
            for index, pooling in enumerate((PoolingType.MEAN, PoolingType.SUM))
        ],
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.02},
    )
    params = EmbeddingModuleShardingPlan(
        {
            f"t{index}": ParameterSharding(by, "fused", ranks=[0])
            for index, by in enumerate(("row_wise", "table_wise"))
        }
    )
    sharder = next(
        each
        for each in build_sharders(prepared(registry()))
        if each.module_type is FusedEmbeddingBagCollection
    )
    with pytest.raises(SetupError, match=r"tables t0 .* divides wrongly"):
        sharder.shard(module, params, ShardingEnv(1, 0), torch.device(device))


@pytest.mark.parametrize("kind", ["bags", "sequences", "fused bags", "managed bags"])
def test_sharding_in_two_dimensions_is_refused(kind: str) -> None:
    module = cases.build(kind)
    sharder = next(
        each for each in build_sharders(prepared(registry())) if each.module_type is type(module)
    )
    params = {name: ParameterSharding("table_wise", "fused", [0]) for name in ("t_a", "t_b")}
    env = object.__new__(ShardingEnv2D)
    env.world_size = 2
    with pytest.raises(SetupError, match=r"^sparse is to be sharded by DMPCollection"):
        sharder.shard(module, EmbeddingModuleShardingPlan(params), env, cases.DEVICE, "sparse")


def test_arguments_of_fused_bags_that_do_nothing_are_refused() -> None:
    bags: Any = cases.build("bags")
    module = FusedEmbeddingBagCollection(
        tables=bags.embedding_bag_configs(),
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.02, "momentum": 0.9},
    )
    sharder = next(
        each
        for each in build_sharders(prepared(registry()))
        if each.module_type is FusedEmbeddingBagCollection
    )
    params = {name: ParameterSharding("table_wise", "fused", [0]) for name in ("t_a", "t_b")}
    with pytest.raises(SetupError, match=r"^sparse: FBGEMM's kernels of exact_sgd do nothing with"):
        sharder.shard(
            module,
            EmbeddingModuleShardingPlan(params),
            ShardingEnv(1, 0),
            torch.device("cpu"),
            "sparse",
        )

"""Caches as large as a plan says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_scars.runtime.kernel import CachedKernels, cache_traffic
from recd_plugin_scars.runtime.spec import CachePolicy, TableCache
from recd_plugin_scars.runtime.tables import as_planned
from recd_plugins.config import TrainingSpec
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder, fused_params
from recd_plugins.testing.gloo import run_on_ranks

ROWS, DIM = 100, 8
CONFIG = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])


def cache(policy: CachePolicy, known: int = ROWS) -> TableCache:
    return TableCache(policy, 0.1, np.arange(known))


def planned(cached: TableCache, params: CacheParams | None) -> int:
    sharding = ParameterSharding("table_wise", "fused_uvm_caching", [0], cache_params=params)
    return as_planned({"t": cached}, {"t": sharding}, [CONFIG])["t"].num_cached_rows(ROWS)


@pytest.mark.parametrize(
    ("load_factor", "rows"), [(0.5, 50), (0.02, 2), (0.25 / ROWS, 0), (1 - 0.25 / ROWS, ROWS)]
)
def test_the_plan_decides(load_factor: float, rows: int) -> None:
    assert planned(cache("static"), CacheParams(load_factor=load_factor)) == rows
    assert planned(cache("lru"), CacheParams(load_factor=load_factor)) == rows


@pytest.mark.parametrize("params", [None, CacheParams(), CacheParams(prefetch_pipeline=True)])
def test_without_a_load_factor_the_cache_stays(params: CacheParams | None) -> None:
    assert planned(cache("static"), params) == 10


def test_a_static_cache_has_no_more_rows_than_are_known() -> None:
    assert planned(cache("static", 30), CacheParams(load_factor=0.5)) == 30
    assert planned(cache("lfu", 30), CacheParams(load_factor=0.5)) == 50


def test_caches_of_other_modules_stay() -> None:
    others = {"t": cache("static"), "u": cache("lru")}
    assert as_planned(others, {}, [CONFIG]) == others


def loaded(rank: int, world_size: int, load_factor: float) -> int:
    """Bytes of the rows that a sharded table has in its fast memory from the start."""
    module = EmbeddingBagCollection(tables=[CONFIG], device=torch.device("meta"))
    sharder = ExactEmbeddingBagCollectionSharder(
        fused_params(TrainingSpec(optimizer="sgd")),
        kernels=[CachedKernels({"t": cache("static")})],
    )
    params: Any = construct_module_sharding_plan(
        module,
        {"t": table_wise(rank=0, compute_kernel="fused_uvm_caching")},
        sharder,
        world_size=1,
        local_size=1,
        device_type="cpu",
    )
    params["t"].cache_params = CacheParams(load_factor=load_factor, prefetch_pipeline=True)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(module, params, env, torch.device("cpu"))
    sharded(KeyedJaggedTensor(["f"], torch.tensor([0, 99]), lengths=torch.tensor([2])))
    return cache_traffic(sharded)["t"].bytes_loaded


def test_kernels_cache_what_the_plan_says() -> None:
    for load_factor, rows in ((0.5, 50), (0.02, 2)):
        assert run_on_ranks(loaded, 1, load_factor)[0] == rows * DIM * 4

"""Caches that fit a plan get kernels as large as it says; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.sharded import CPU, plan_of, sharded
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_scars.runtime.kernel import CachedKernels, cached_kernels
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.runtime.tables import as_planned
from recd_plugin_scars.tests.runtime.kernels import cached_kernel, config_of
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)

UVM = "fused_uvm_caching"
CACHED, FUSED = (table_wise(rank=0, compute_kernel=kernel) for kernel in (UVM, "fused"))
LRU = TableCache("lru", 0.5)
IN_FILE = TableCache("lru", 0.5, folder=Path("rows"))
HOT = np.array([4, 2, 0])


pytestmark = pytest.mark.usefixtures("one_rank")


def shard(
    caches: dict[str, TableCache],
    plan: dict[str, Any],
    *,
    cache_params: CacheParams | None = None,
    widths: tuple[int, ...] = (8, 8),
    of_another: dict[str, TableCache] | None = None,
    rows: int = 6,
) -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=d, feature_names=[f"f_{n}"])
        for n, d in zip("abc", widths, strict=False)
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=CPU))
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    kernels = [CachedKernels(caches), CachedKernels(of_another or {})]
    sharder = ExactEmbeddingBagCollectionSharder(params, kernels=kernels)
    module_plan = plan_of(model[0], plan, sharder, 1, 1, "cpu")
    for sharding in module_plan.values():
        sharding.cache_params = cache_params
    return sharded(model, ShardingPlan({"0": module_plan}), [sharder], CPU)


def test_kernels_on_cpu() -> None:
    for kind in (ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder):
        assert kind().compute_kernels("row_wise", "cpu") == ["fused"]
        with_caches = kind(kernels=[CachedKernels({"a": LRU})])
        assert with_caches.compute_kernels("row_wise", "cpu") == ["fused", UVM]
        assert with_caches.compute_kernels("data_parallel", "cpu") == ["dense"]


def test_cached_and_uncached_tables_of_one_module() -> None:
    plan, params = {"a": row_wise(compute_kernel=UVM), "b": row_wise()}, CacheParams()
    params.prefetch_pipeline = True
    dmp = shard({"a": LRU, "elsewhere": LRU}, plan, cache_params=params)
    assert [name for kernel in cached_kernels(dmp) for name, _ in kernel.traffic()] == ["a"]


def test_tables_of_different_widths_get_a_kernel_each() -> None:
    params, caches = CacheParams(prefetch_pipeline=True), {"a": LRU, "b": LRU}
    dmp = shard(caches, {"a": CACHED, "b": CACHED}, widths=(8, 16), cache_params=params)
    assert len(list(cached_kernels(dmp))) == 2


@pytest.mark.parametrize(
    ("caches", "plan", "options", "message"),
    [
        ({"a": LRU}, {"a": CACHED, "b": FUSED}, {}, "share one lookup kernel"),
        (
            {"a": LRU},
            {"a": CACHED, "b": CACHED},
            {"of_another": {"b": LRU}},
            "share one lookup kernel",
        ),
        (
            {"a": LRU, "b": LRU},
            {"a": CACHED, "b": CACHED},
            {"widths": (8, 16)},
            r"'a' and 'b' .* different widths \(8 and 16\)",
        ),
        ({"a": LRU, "b": IN_FILE}, {"a": CACHED, "b": CACHED}, {}, "Set option 'storage'"),
    ],
)
def test_tables_that_got_one_kernel_and_should_not(
    caches: dict[str, TableCache], plan: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        shard(caches, plan, **options)


@pytest.mark.parametrize(
    ("params", "cache", "message"),
    [
        ({"optimizer": EmbOptimType.ADAM}, LRU, "'t0' do not support the optimizer ADAM"),
        ({"beta1": 0.9}, LRU, "fused_params 'beta1'"),
        ({"weight_decay": 0.1}, LRU, "'t0' do not support weight_decay"),
        ({}, TableCache("static", 0.5, np.array([6, 1, 2])), "hot_rows contains row 6"),
        ({}, TableCache("static", 0.5, np.array([1, 2])), "has 3 rows, but hot_rows has only 2"),
        ({}, TableCache("lfu", 0.5, np.array([1, 2, 1])), "contains a row twice"),
        ({"type": DataType.FP16}, LRU, "FP16 rows. Use FP32"),
    ],
)
def test_tables_that_cannot_be_cached(
    params: dict[str, Any], cache: TableCache, message: str
) -> None:
    config = config_of([6], **{name: value for name, value in params.items() if name != "type"})
    config.data_type = params.get("type", DataType.FP32)
    with pytest.raises(SetupError, match=message):
        cached_kernel(config, {"t0": cache})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mru", 0.5, HOT), "no policy named 'mru'"),
        (("lru", 1.5), "load_factor is 1.5"),
        (("static", 0.5), "policy 'static' needs hot_rows"),
    ],
)
def test_refused_caches(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TableCache(*arguments)


def test_hot_rows_from_the_start() -> None:
    assert TableCache("static", 0.2, HOT).first_hot_rows("t", 10).tolist() == [4, 2]
    assert TableCache("lru", 0.5).first_hot_rows("t", 10).tolist() == []


@pytest.mark.parametrize(
    ("cache", "params", "rows"),
    [
        *(
            (TableCache(policy, 0.1, np.arange(100)), CacheParams(load_factor=factor), rows)
            for policy in ("static", "lru")
            for factor, rows in ((0.5, 50), (0.25 / 100, 0), (1 - 0.25 / 100, 100))
        ),
        # A static cache has no more rows than are known.
        (TableCache("static", 0.1, np.arange(30)), CacheParams(load_factor=0.5), 30),
        (TableCache("lfu", 0.1, np.arange(30)), CacheParams(load_factor=0.5), 50),
        # Without a load factor it stays.
        (TableCache("lru", 0.1), CacheParams(prefetch_pipeline=True), 10),
        (TableCache("lru", 0.1), None, 10),
    ],
)
def test_the_plan_decides(cache: TableCache, params: CacheParams | None, rows: int) -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])
    sharding = ParameterSharding("table_wise", UVM, [0], cache_params=params)
    found = as_planned({"t": cache, "u": LRU}, {"t": sharding}, [config])
    assert found["t"].num_cached_rows(100) == rows
    assert found["u"] == LRU


def test_kernels_cache_what_the_plan_says() -> None:
    cache = TableCache("static", 0.1, np.arange(100))
    for load_factor, rows in ((0.5, 50), (0.02, 2)):
        params = CacheParams(load_factor=load_factor, prefetch_pipeline=True)
        dmp = shard({"a": cache}, {"a": CACHED}, cache_params=params, widths=(8,), rows=100)
        dmp(KeyedJaggedTensor(["f_a"], torch.tensor([0, 99]), lengths=torch.tensor([2])))
        (kernel,) = cached_kernels(dmp)
        assert kernel._rows._pool.num_slots >= rows
        assert (kernel._rows._pool.row_of_slot >= 0).sum() in (rows, rows + 1)

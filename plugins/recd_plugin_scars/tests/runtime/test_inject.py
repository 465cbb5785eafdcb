"""Plans and caches that do not fit together are refused; those that do get cached kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugin_scars.runtime.kernel import CachedKernels, cached_kernels
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugin_scars.tests.runtime.kernels import cached_kernel, config_of
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)

CPU = torch.device("cpu")
CACHED = "fused_uvm_caching"
FUSED = table_wise(rank=0, compute_kernel="fused")
LRU = TableCache("lru", 0.5)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(
    caches: dict[str, TableCache],
    plan: dict[str, Any],
    *,
    cache_params: CacheParams | None = None,
    widths: tuple[int, ...] = (8, 8),
    of_another: dict[str, TableCache] | None = None,
) -> DistributedModelParallel:
    """A model of tables a, b, ... with 6 rows each."""
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=6, embedding_dim=width, feature_names=[f"f_{name}"]
        )
        for name, width in zip("abc", widths, strict=False)
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=CPU))
    sharder = ExactEmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5},
        kernels=[CachedKernels(caches), CachedKernels(of_another or {})],
    )
    module_plan = construct_module_sharding_plan(
        model[0], plan, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    for sharding in module_plan.values():
        sharding.cache_params = cache_params  # type: ignore[attr-defined]
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"0": module_plan}),
        sharders=[sharder],
    )


def test_kernels_on_cpu() -> None:
    for kind in (ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder):
        assert kind().compute_kernels("row_wise", "cpu") == ["fused"]
        with_caches = kind(kernels=[CachedKernels({"a": LRU})])
        assert with_caches.compute_kernels("row_wise", "cpu") == ["fused", CACHED]
        assert with_caches.compute_kernels("data_parallel", "cpu") == ["dense"]
        on_cuda = with_caches.compute_kernels("row_wise", "cuda")
        assert on_cuda == kind().compute_kernels("row_wise", "cuda")


def test_cached_and_uncached_tables_of_one_module() -> None:
    dmp = shard(
        {"a": LRU, "elsewhere": LRU},
        {"a": row_wise(compute_kernel=CACHED), "b": row_wise()},
        cache_params=CacheParams(prefetch_pipeline=True),
    )
    assert [name for kernel in cached_kernels(dmp) for name, _ in kernel.traffic()] == ["a"]
    # The stock lookups are as they were.
    assert GroupedPooledEmbeddingsLookup._create_embedding_kernel.__module__.startswith("torchrec.")


def test_tables_that_got_one_kernel_and_should_not() -> None:
    cached = table_wise(rank=0, compute_kernel=CACHED)
    with pytest.raises(SetupError, match="got one kernel, and some have a cache"):
        shard({"a": LRU}, {"a": cached, "b": FUSED})
    with pytest.raises(SetupError, match=r"a and b of different widths \(8 and 16\)"):
        shard({"a": LRU, "b": LRU}, {"a": cached, "b": cached}, widths=(8, 16))
    apart = shard(
        {"a": LRU, "b": LRU},
        {"a": cached, "b": cached},
        widths=(8, 16),
        cache_params=CacheParams(prefetch_pipeline=True),
    )
    assert len(list(cached_kernels(apart))) == 2
    with pytest.raises(SetupError, match="got one kernel, and some have a cache"):
        shard({"a": LRU}, {"a": cached, "b": cached}, of_another={"b": LRU})
    in_file = TableCache("lru", 0.5, folder=Path("rows"))
    with pytest.raises(SetupError, match=r"a and b share a kernel.*give them one storage"):
        shard({"a": LRU, "b": in_file}, {"a": cached, "b": cached})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"optimizer": EmbOptimType.ADAM}, r"t0 do not support the optimizer ADAM"),
        ({"beta1": 0.9}, r"fused_params beta1"),
        ({"enable_raw_embedding_streaming": True}, r"raw_embedding_streaming, which needs"),
        (
            {"weight_decay": 0.1},
            r"t0 do not support weight_decay",
        ),
    ],
)
def test_optimizers_that_cannot_be_cached(params: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        cached_kernel(config_of([6], **params), {"t0": LRU})


def test_types_that_cannot_be_cached() -> None:
    config = config_of([6])
    config.data_type = DataType.FP16
    with pytest.raises(SetupError, match="FP16 rows; only FP32"):
        cached_kernel(config, {"t0": LRU})


def test_a_profile_of_another_table_is_refused() -> None:
    with pytest.raises(SetupError, match="hot_rows of table t0 names row 6"):
        cached_kernel(config_of([6]), {"t0": TableCache("static", 0.5, np.array([6, 1, 2]))})

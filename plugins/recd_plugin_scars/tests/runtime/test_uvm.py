"""FBGEMM's UVM cache on the fake CUDA device, whose lookups bypass the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import PoolingType

from recd_plugin_scars.runtime.kernel import CachedKernels
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.tests.runtime.kernels import batch_of, config_of
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.fake_cuda import fake_cuda, host_counts

UNLOCK = "fbgemm::lxu_cache_locking_counter_decrement"
BATCHES = [[[1, 2], [3]]], [[[4], [0, 5]]], [[[7, 7], [6]]]


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.NONE])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_each_lookup_gets_the_slots_of_its_own_prefetch(policy: str, pooling: PoolingType) -> None:
    launch(_look_up_out_of_order, 1, policy, pooling)


def _look_up_out_of_order(rank: int, world_size: int, policy: Any, pooling: PoolingType) -> None:
    with fake_cuda() as device:
        kernel = _kernel(policy, pooling, device)
        tables = kernel.emb_module
        weights = tables.split_embedding_weights()[0]
        batches = [batch_of(*ids).to(device) for ids in BATCHES]
        kernel.prefetch(batches[0])
        kernel.prefetch(batches[1])
        slots = [each[-1] for each in kernel._prefetched]
        assert len(slots) == (2 if policy == "lru" else 0)

        with host_counts() as counts, torch.no_grad():  # an evaluation between two steps
            _check_rows(kernel(batches[2]), weights, BATCHES[2], pooling)
        assert tables.lxu_cache_locations.shape == batches[2].values().shape
        assert all(tables.lxu_cache_locations is not each for each in slots)
        assert _count(counts, UNLOCK) == (policy == "lru")

        # The step of the first batch failed before its lookup.
        with host_counts() as counts:
            _check_rows(kernel(batches[1]), weights, BATCHES[1], pooling).sum().backward()
        if policy == "lru":
            assert tables.lxu_cache_locations is slots[1]
            assert _count(counts, UNLOCK) == 2  # of the first batch, and after the second
            assert not _count(counts, "fbgemm::lru_cache_populate")


def test_loaded_tables_empty_the_cache() -> None:
    launch(_load_between_prefetch_and_lookup, 1)


def _load_between_prefetch_and_lookup(rank: int, world_size: int) -> None:
    with fake_cuda() as device:
        kernel = _kernel("lru", PoolingType.SUM, device)
        batch = batch_of(*BATCHES[0]).to(device)
        kernel.prefetch(batch)
        with host_counts() as counts:
            kernel.purge()
        assert _count(counts, "fbgemm::lxu_cache_flush") == 1
        kernel.load()
        with host_counts() as counts:
            kernel(batch)
        assert _count(counts, "fbgemm::lru_cache_populate") == 1


def _kernel(policy: Any, pooling: PoolingType, device: torch.device) -> Any:
    config = config_of([8], pooling, device=str(device), cache_load_factor=0.5)
    kernels = CachedKernels({"t0": TableCache(policy, 0.5, uvm=True)})
    if pooling == PoolingType.NONE:
        return kernels.sequences(config, None, device)
    return kernels.bags(config, None, device, None)


def _check_rows(rows: Tensor, weights: Tensor, ids: Any, pooling: PoolingType) -> Tensor:
    bags = [weights.cpu()[torch.tensor(bag)] for bag in ids[0]]
    if pooling != PoolingType.NONE:
        bags = [bag.sum(0, keepdim=True) for bag in bags]
    torch.testing.assert_close(rows.detach().cpu(), torch.cat(bags))
    return rows


def _count(counts: Any, operator: str) -> int:
    wanted = ("dispatched", operator)
    return sum(n for each, n in counts.items() if (each.what, each.kind) == wanted)


def test_only_policies_of_fbgemm_use_its_cache() -> None:
    for wrong in ({"policy": "static"}, {"policy": "lru", "folder": "rows"}):
        with pytest.raises(SetupError, match="FBGEMM's UVM cache"):
            TableCache(load_factor=0.5, hot_rows=np.arange(4), uvm=True, **wrong)  # type: ignore[arg-type]
    assert TableCache("lru", 0.5, uvm=True).prefetches
    assert not TableCache("lfu", 0.5, uvm=True).prefetches

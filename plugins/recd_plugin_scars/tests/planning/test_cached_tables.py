"""TorchRec's planner and tables that are cached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.planning import test_planner
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugin_scars.cache import CacheStrategy
from recd_plugin_scars.planning import CachePlan, TableLoad
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.runtime.tables import as_planned
from recd_plugin_torchrec.shardings import ColumnWise, RowWise
from recd_plugins.interfaces import Cache
from recd_plugins.interfaces.batch import Placement
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.distributions import from_weights
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.estimates import RESERVED_SHARE
from recd_plugins.planning.planner import SortedEnumerator
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.topologies import load_topology, this_machine

ROWS, DIM = 10_000, 16
STATE = 4  # bytes of row-wise Adagrad's, a row


class Caches(Cache):
    name = "test.caches"

    def check(self, device: torch.device) -> None:
        """Runs everywhere."""


def model(*names: str) -> nn.Module:
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f_{name}"]
        )
        for name in names
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    return nn.ModuleDict({"bags": bags})


def load(name: str, exponent: float) -> TableLoad:
    """A table whose row of rank r is read r^-exponent times as often as the first."""
    reads = np.arange(1, ROWS + 1, dtype=np.float64) ** -exponent
    return TableLoad(from_weights(name, reads, 1.0, features=(f"f_{name}",)), DIM)


def registry(
    exponents: Mapping[str, float],
    share: float,
    *,
    storage: Path | None = None,
    sharding: Any = None,
) -> Prepared:
    loads = {name: load(name, exponent) for name, exponent in exponents.items()}
    plan = CachePlan.of(
        loads,
        {name: round(share * ROWS) for name in loads},
        batch_size=test_planner.BATCH_SIZE,
        optimizer="rowwise_adagrad",
    )
    caches = {
        name: TableCache("static", share, np.arange(ROWS), folder=storage) for name in exponents
    }
    shardings = [] if sharding is None else [(sharding, ["*"])]
    cache = [(Caches(Caches.Options()), exponents)]
    reg = test_planner.registry(*shardings, cache=cache, optimizer="rowwise_adagrad")
    parts = {"cache[0]": CacheStrategy(caches, plan)}
    return Prepared(reg, model(*exponents), Placement(), {}, parts=parts)


def part_of(ready: Prepared) -> CacheStrategy:
    (part,) = ready.parts.values()
    assert isinstance(part, CacheStrategy)
    return part


def topology(device: str, ranks: int = 2) -> Topology:
    if device == "cpu":
        return this_machine(ranks).to_torchrec()
    return load_topology("zionex-a100-40g", nodes=1, ranks_per_node=ranks).to_torchrec()


def constraints(ready: Prepared, module: nn.Module, device: str) -> dict[str, ParameterConstraints]:
    return table_constraints(ready, tables_of(module), profile=DataProfile({}), device_type=device)


def enumerator_of(ready: Prepared, module: nn.Module, device: str) -> SortedEnumerator:
    given = constraints(ready, module, device)
    parts = tuple(ready.parts.values())
    return SortedEnumerator(topology(device), given, ready.registry.training, parts)


def static_bytes(ready: Prepared, module: nn.Module, device: str, kind: str) -> list[Any]:
    enumerator = enumerator_of(ready, module, device)
    found = enumerator.enumerate(module, ready.sharders())
    chosen = [o for o in found if (o.name, o.sharding_type) == ("a", kind)]
    return enumerator.static_storage(chosen)["a"]


def fast_bytes(ready: Prepared, rows: int, dim: int, share: float) -> int:
    statistics = part_of(ready)._plan.statistics("a")
    cold = statistics.expected_lookups * statistics.expected_miss_rate(share) * rows / ROWS
    slots = min(rows, round(share * rows) + round(2 * cold))
    return slots * (4 * dim + STATE + 16) + 4 * rows


@pytest.mark.parametrize(
    ("kind", "rows", "dim"),
    [("table_wise", ROWS, DIM), ("row_wise", ROWS // 2, DIM), ("column_wise", ROWS, DIM // 2)],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("in_file", [False, True])
def test_memory_is_that_of_the_tiers(
    kind: str, rows: int, dim: int, device: str, in_file: bool
) -> None:
    sharding = {
        "table_wise": None,
        "row_wise": RowWise(RowWise.Options()),
        "column_wise": ColumnWise(ColumnWise.Options(shards=2)),
    }[kind]
    storage = Path("slow") if in_file else None
    ready = registry({"a": 1.1}, 0.05, storage=storage, sharding=sharding)
    fast = fast_bytes(ready, rows, dim, 0.05)
    slow = 0 if in_file else rows * (4 * dim + STATE)
    for shard in static_bytes(ready, model("a"), device, kind):
        found = (shard.hbm, shard.ddr)
        assert found == ((fast, slow) if device == "cuda" else (0, fast + slow))


def test_a_table_in_a_file_may_be_larger_than_memory() -> None:
    module = model("a")
    where = this_machine(1)
    for part, storage, fits in ((0.5, Path("slow"), True), (0.5, None, False), (1.5, None, True)):
        ready = registry({"a": 1.1}, 0.05, storage=storage)
        memory = int(part * ROWS * (4 * DIM + STATE) / (1 - RESERVED_SHARE))
        there = where.model_copy(update={"ddr_bytes": memory}).to_torchrec()
        planner = ready.planner(there, profile=DataProfile({}))
        assert planner.fits(module, ready.sharders()) == fits, (part, storage)


def test_other_tables_keep_their_kernels() -> None:
    ready = registry({"a": 1.1}, 0.05)
    found = constraints(ready, model("a", "b"), "cpu")
    assert found["a"].compute_kernels == ["fused_uvm_caching"]
    assert found["b"].compute_kernels is None
    assert found["b"].cache_params is None
    planned = ready.planner(topology("cpu"), profile=DataProfile({})).plan(
        model("a", "b"), ready.sharders()
    )
    kernels = {
        name: sharding.compute_kernel for name, sharding in cast(Any, planned.plan["bags"]).items()
    }
    assert kernels == {"a": "fused_uvm_caching", "b": "fused"}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_can_be_cached(share: float) -> None:
    """TorchRec's planner takes load factors strictly between 0 and 1."""
    ready, module = registry({"a": 1.1}, share), model("a")
    plan = ready.planner(topology("cpu"), profile=DataProfile({})).plan(module, ready.sharders())
    params = cast(Any, plan.plan["bags"])
    assert 0 < params["a"].cache_params.load_factor < 1
    configs = cast(Any, module)["bags"].embedding_bag_configs()
    cache = as_planned(part_of(ready).caches, params, configs)["a"]
    assert cache.num_cached_rows(ROWS) == share * ROWS


def test_misses_take_time_by_where_they_come_from() -> None:
    module = model("a")
    for device in ("cpu", "cuda"):
        where = topology(device)
        rate = where.ddr_mem_bw if device == "cpu" else where.hbm_to_ddr_mem_bw
        times = []
        for share, storage in ((0.05, None), (0.5, None), (0.05, Path("slow"))):
            ready = registry({"a": 1.1}, share, storage=storage)
            statistics = part_of(ready)._plan.statistics("a")
            cold = statistics.expected_lookups * statistics.expected_miss_rate(share)
            slower = 1.0 if storage is None else rate * 1000 / 2**30
            enumerator = enumerator_of(ready, module, device)
            (option,) = (
                each
                for each in enumerator.enumerate(module, ready.sharders())
                if (each.sharding_type, each.compute_kernel) == ("table_wise", "fused_uvm_caching")
            )
            perf = option.shards[0].perf
            assert perf.prefetch_compute == pytest.approx(cold * DIM * 4 / rate * slower)
            times.append(perf.total)
        small, large, file = times
        assert large < small < file

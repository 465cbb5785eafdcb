from __future__ import annotations

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
    sizes = {"embedding_dim": DIM, "num_embeddings": ROWS}
    tables = [EmbeddingBagConfig(name=each, feature_names=[f"f_{each}"], **sizes) for each in names]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    return nn.ModuleDict({"bags": bags})


def registry(share: float, *, storage: Path | None = None, sharding: Any = None) -> Prepared:
    """Table a is cached. Its row of rank r is read r^-1.1 times as often as the first."""
    reads = np.arange(1, ROWS + 1, dtype=np.float64) ** -1.1
    load = TableLoad(from_weights("a", reads, 1.0, features=("f_a",)), DIM)
    batch, optimizer = test_planner.BATCH_SIZE, "rowwise_adagrad"
    cached = {"a": round(share * ROWS)}
    plan = CachePlan.of({"a": load}, cached, batch_size=batch, optimizer=optimizer)
    caches = {"a": TableCache("static", share, np.arange(ROWS), folder=storage)}
    shardings = [] if sharding is None else [(sharding, ["*"])]
    cache = [(Caches(Caches.Options()), ["a"])]
    reg = test_planner.registry(*shardings, cache=cache, optimizer=optimizer)
    parts = {"cache[0]": CacheStrategy(caches, plan)}
    return Prepared(reg, model("a"), Placement(), {}, parts=parts)


def part_of(ready: Prepared) -> CacheStrategy:
    (part,) = ready.parts.values()
    assert isinstance(part, CacheStrategy)
    return part


def topology(device: str) -> Topology:
    if device == "cpu":
        return this_machine(2).to_torchrec()
    return load_topology("zionex-a100-40g", nodes=1, ranks_per_node=2).to_torchrec()


def constraints(ready: Prepared, module: nn.Module, device: str) -> dict[str, ParameterConstraints]:
    return table_constraints(ready, tables_of(module), profile=DataProfile({}), device_type=device)


def enumerator_of(ready: Prepared, module: nn.Module, device: str) -> SortedEnumerator:
    given = constraints(ready, module, device)
    parts = tuple(ready.parts.values())
    return SortedEnumerator(topology(device), given, ready.registry.training, parts)


def misses(ready: Prepared, share: float) -> float:
    statistics = part_of(ready)._plan.statistics("a")
    return statistics.expected_lookups * statistics.expected_miss_rate(share)


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
    ready, module = registry(0.05, storage=storage, sharding=sharding), model("a")
    slots = min(rows, round(0.05 * rows) + round(2 * misses(ready, 0.05) * rows / ROWS))
    fast = slots * (4 * dim + STATE + 16) + 4 * rows
    slow = 0 if in_file else rows * (4 * dim + STATE)
    enumerator = enumerator_of(ready, module, device)
    options = enumerator.enumerate(module, ready.sharders())
    chosen = [each for each in options if (each.name, each.sharding_type) == ("a", kind)]
    for shard in enumerator.static_storage(chosen)["a"]:
        found = (shard.hbm, shard.ddr)
        assert found == ((fast, slow) if device == "cuda" else (0, fast + slow))


def test_a_table_in_a_file_may_be_larger_than_memory() -> None:
    module = model("a")
    where = this_machine(1)
    for part, storage, fits in ((0.5, Path("slow"), True), (0.5, None, False), (1.5, None, True)):
        ready = registry(0.05, storage=storage)
        memory = int(part * ROWS * (4 * DIM + STATE) / (1 - RESERVED_SHARE))
        there = where.model_copy(update={"ddr_bytes": memory}).to_torchrec()
        planner = ready.planner(there, profile=DataProfile({}))
        assert planner.fits(module, ready.sharders()) == fits, (part, storage)


def test_other_tables_keep_their_kernels() -> None:
    ready, both = registry(0.05), model("a", "b")
    found = constraints(ready, both, "cpu")
    assert found["a"].compute_kernels == ["fused_uvm_caching"]
    assert found["b"].compute_kernels is None
    assert found["b"].cache_params is None
    planner = ready.planner(topology("cpu"), profile=DataProfile({}))
    planned = cast(Any, planner.plan(both, ready.sharders()).plan["bags"])
    kernels = {name: sharding.compute_kernel for name, sharding in planned.items()}
    assert kernels == {"a": "fused_uvm_caching", "b": "fused"}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_can_be_cached(share: float) -> None:
    """TorchRec's planner takes load factors strictly between 0 and 1."""
    ready, module = registry(share), model("a")
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
            ready = registry(share, storage=storage)
            slower = 1.0 if storage is None else rate * 1000 / 2**30
            enumerator = enumerator_of(ready, module, device)
            (option,) = (
                each
                for each in enumerator.enumerate(module, ready.sharders())
                if (each.sharding_type, each.compute_kernel) == ("table_wise", "fused_uvm_caching")
            )
            perf = option.shards[0].perf
            expected = misses(ready, share) * DIM * 4 / rate * slower
            assert perf.prefetch_compute == pytest.approx(expected)
            times.append(perf.total)
        small, large, file = times
        assert large < small < file

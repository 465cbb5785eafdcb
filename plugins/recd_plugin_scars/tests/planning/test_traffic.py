"""Predicted traffic, against rows that are drawn and moved."""

from __future__ import annotations

import numpy as np
import pytest

from recd_plugin_scars.planning import CachePlan, TableLoad, traffic
from recd_plugins.interfaces.distributions import zipf


@pytest.fixture
def loads() -> dict[str, TableLoad]:
    return {
        "a": TableLoad(zipf("a", 3000, 2.0, 1.1), 16),
        "b": TableLoad(zipf("b", 500, 1.0, 0.8, seed=3), 32),
    }


@pytest.mark.parametrize("held", [0, 1])
def test_predicted_rows_are_those_of_drawn_batches(loads: dict[str, TableLoad], held: int) -> None:
    load = loads["a"]
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(load.access.accesses)
    unique, missed, cold = [], [], []
    before = np.empty(0, np.int64)
    for _ in range(400):
        drawn = np.searchsorted(cumulative, rng.random(256) * cumulative[-1])
        batch = np.unique(drawn)
        unique.append(len(batch))
        cold.append(int((drawn >= 200).sum()))
        fetched = batch[batch >= 200]
        missed.append(len(np.setdiff1d(fetched, before)) if held else len(fetched))
        before = batch
    (found,) = traffic(
        [load], {"a": 200}, batch_size=128, optimizer="rowwise_adagrad", held=held
    ).values()
    assert found.lookups == pytest.approx(256)
    assert found.unique_rows == pytest.approx(float(np.mean(unique)), rel=0.01)
    assert found.cold_lookups == pytest.approx(float(np.mean(cold)), rel=0.02)
    assert found.misses == pytest.approx(float(np.mean(missed[1:])), rel=0.02)
    assert found.bytes_read == found.bytes_written == found.misses * 68
    assert found.bytes == 2 * found.bytes_read
    assert found.plain_bytes == pytest.approx(2 * 256 * 68)
    assert found.coalesced_bytes == found.unique_rows * 2 * 68
    assert found.cached_bytes == found.cold_lookups * 2 * 68
    assert found.hits + found.misses == pytest.approx(found.unique_rows)


def test_columns_are_moved_by_each_shard_with_a_state_of_its_own(
    loads: dict[str, TableLoad],
) -> None:
    whole = traffic([loads["b"]], {"b": 10}, batch_size=64, optimizer="rowwise_adagrad")["b"]
    split = whole.column_wise(2)
    assert split.misses == 2 * whole.misses
    assert split.hit_rate == whole.hit_rate
    assert split.row_bytes == 32 * 4 // 2 + 4
    assert split.bytes_read == whole.misses * (32 * 4 + 2 * 4)


def test_what_is_not_cached_moves_its_distinct_rows(loads: dict[str, TableLoad]) -> None:
    found = traffic(list(loads.values()), {}, batch_size=64, optimizer="sgd")
    assert all(table.misses == table.unique_rows for table in found.values())
    assert all(table.cold_lookups == table.lookups for table in found.values())
    every = {"a": 3000, "b": 500}
    found = traffic(list(loads.values()), every, batch_size=64, optimizer="sgd", policy="lru")
    assert all(table.misses == 0 for table in found.values())


def test_a_plan_within_bytes(loads: dict[str, TableLoad]) -> None:
    plan = CachePlan.within(loads, 10_000, batch_size=64, optimizer="sgd")
    assert 10_000 - 128 < plan.cached_bytes <= 10_000
    a, b = plan.tables["a"], plan.tables["b"]
    assert a.cached * 64 + b.cached * 128 == plan.cached_bytes
    assert b.load.hot_rows(b.cached).tolist() == loads["b"].access.rows[: b.cached].tolist()
    assert b.load_factor == b.cached / 500
    assert (a.useful, b.useful) == (3000, 500)
    everything = CachePlan.within(loads, None, batch_size=64, optimizer="sgd")
    assert everything.cached_bytes == 3000 * 64 + 500 * 128


def test_rows_that_are_not_read_again_are_not_cached(loads: dict[str, TableLoad]) -> None:
    plan = CachePlan.within(loads, None, batch_size=64, optimizer="sgd", steps=20)
    for name, load in loads.items():
        # More than one read in 20 steps of 64 samples.
        reads = load.access.accesses * 64 * 20
        assert plan.tables[name].cached == plan.tables[name].useful == int((reads > 1).sum())

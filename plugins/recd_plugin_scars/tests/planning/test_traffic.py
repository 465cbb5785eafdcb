"""Predicted traffic, against rows that are drawn and moved."""

from __future__ import annotations

import numpy as np
import pytest

from recd_plugin_scars.planning import TableLoad, traffic
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

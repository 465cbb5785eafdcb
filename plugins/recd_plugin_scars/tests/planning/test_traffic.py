"""Plans of caches: predicted traffic against drawn rows, and the order of the cached rows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from recd_plugin_scars.planning import CachePlan, RowOrder, TableLoad
from recd_plugin_scars.tests.planning.test_joint import unique_bytes
from recd_plugins.interfaces.distributions import from_weights, zipf

LOAD = TableLoad(zipf("a", 3000, 2.0, 1.1), 16)


@pytest.mark.parametrize("held", [0, 1])
def test_predicted_rows_are_those_of_drawn_batches(held: int) -> None:
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(LOAD.access.accesses)
    unique, missed = [], []
    before = np.empty(0, np.int64)
    for _ in range(400):
        batch = np.unique(np.searchsorted(cumulative, rng.random(256) * cumulative[-1]))
        unique.append(len(batch))
        fetched = batch[batch >= 200]
        missed.append(len(np.setdiff1d(fetched, before)) if held else len(fetched))
        before = batch
    optimizer = "rowwise_adagrad"
    plan = CachePlan.of({"a": LOAD}, {"a": 200}, batch_size=128, optimizer=optimizer, held=held)
    found = plan.tables["a"].traffic
    assert found.lookups == pytest.approx(256)
    assert found.unique_rows == pytest.approx(float(np.mean(unique)), rel=0.01)
    assert found.misses == pytest.approx(float(np.mean(missed[1:])), rel=0.02)
    assert found.bytes_read == found.bytes_written == found.bytes / 2 == found.misses * 68
    assert found.plain_bytes == pytest.approx(2 * 256 * 68)
    assert found.coalesced_bytes == found.unique_rows * 2 * 68
    assert found.hits + found.misses == pytest.approx(found.unique_rows)
    split = found.column_wise(2)
    assert split.misses == 2 * found.misses
    assert split.hit_rate == found.hit_rate
    assert split.bytes_read == found.misses * (16 * 4 + 2 * 4)  # with a state for each shard


@pytest.mark.parametrize("seed", range(5))
def test_tables_of_different_widths_share_memory_as_enumeration_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [20.0, 36.0, 68.0]
    loads = [
        TableLoad(from_weights(f"t{size}", np.sort(rng.random(6))[::-1], rng.uniform(0.5, 3)), 4)
        for size in sizes
    ]
    order = RowOrder(loads, sizes)

    every = {rows: unique_bytes(loads, sizes, rows, 5.0) for rows in product(range(7), repeat=3)}
    for place in range(19):
        rows = tuple(order.rows(place))
        assert sum(rows) == place
        used = float(np.dot(rows, sizes))
        within = [value for other, value in every.items() if np.dot(other, sizes) <= used]
        assert every[rows] == pytest.approx(min(within), rel=1e-9, abs=1e-9)
        assert order.fitting(used) == place
        assert order.fitting(used - 1) == place - 1 or place == 0


def test_a_row_is_useful_that_is_read_more_than_once() -> None:
    order = RowOrder([TableLoad(zipf("t", 1000, 1.0, 1.0), 4)], [16.0])
    assert order.useful(100) == int(100 / float((1 / np.arange(1, 1001)).sum()))
    assert order.useful(1e9) == 1000
    unread = TableLoad(from_weights("t", np.array([2.0, 1.0]), 1.0, num_embeddings=50), 4)
    assert RowOrder([unread], [16.0]).useful(1e12) == 2

"""Expected rows of a batch, against the paper's formula and against draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recd_plugin_scars.planning.load import BatchRows, TableLoad, seen
from recd_plugins.interfaces.access import TableAccess
from recd_plugins.interfaces.distributions import from_weights, zipf


def zipf_load(length: float = 1.0) -> TableLoad:
    return TableLoad(zipf("t", 1000, length, 1.0), 16)


def _unique(probabilities: NDArray[np.float64], lookups: float) -> float:
    return float(seen(probabilities, lookups).sum())


def test_the_check_value_of_equation_2() -> None:
    load = zipf_load()
    assert _unique(load.access.probabilities(), 256) == pytest.approx(130.0641, abs=5e-5)
    assert BatchRows(load, 256).unique == pytest.approx(130.0641, abs=5e-5)


@given(st.floats(0, 1), st.integers(1, 200))
def test_seen_is_the_paper_s_formula(probability: float, lookups: int) -> None:
    (found,) = seen(np.array([probability]), lookups)
    assert found == pytest.approx(1 - (1 - probability) ** lookups, abs=1e-12)
    # 1 - (1 - P)^n would be 0 in float64 for rows that are hardly read.
    assert seen(np.array([1e-20]), 1000)[0] == pytest.approx(1e-17, rel=1e-12)


@pytest.mark.parametrize("cached", [0, 1, 7, 999, 1000])
def test_cold_rows_are_the_sum_over_what_is_not_cached(cached: int) -> None:
    load = zipf_load(length=3.0)
    rows = BatchRows(load, 64)
    assert rows.lookups == pytest.approx(192)
    expected = _unique(load.access.accesses[cached:] / 3, 192)
    assert rows.cold(cached) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_rows_that_batches_in_flight_hold_are_not_fetched_again() -> None:
    load = zipf_load()
    u = seen(load.access.accesses, 64)
    rows = BatchRows(load, 64)
    for held in (0, 1, 2):
        expected = float((u * (1 - u) ** held)[10:].sum())
        assert rows.missed(10, held) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rows", [70_000, 2_000_000])
def test_segments_of_large_tables_change_nothing_that_counts(rows: int) -> None:
    falling = from_weights("t", np.exp(np.arange(rows) / (-rows / 20)), 1.0)
    for access in (zipf("t", rows, 1.0, 1.05), falling):
        load = TableLoad(access, 16)
        batch = BatchRows(load, 8192)
        assert len(load.segments.probabilities) < 100_000
        for cached in (0, 1000, 65_536, 68_123, rows - 1):
            exact = _unique(access.accesses[cached:], 8192)
            assert batch.cold(cached) == pytest.approx(exact, rel=1e-6, abs=1e-6 * batch.unique)


def test_segments_of_counts() -> None:
    counts = np.repeat([9.0, 4.0, 1.0], [5, 100_000, 50_000]).astype(np.float64)
    load = TableLoad(from_weights("t", counts, 1.0, num_embeddings=200_000), 16)
    segments = load.segments
    assert segments.ends[-1] == 200_000
    assert float(segments.probabilities @ segments.num_rows) == pytest.approx(1.0)
    expected = [_unique(counts[cut:] / counts.sum(), 500) for cut in (3, 80_000, 120_000)]
    found = [BatchRows(load, 500).cold(cut) for cut in (3, 80_000, 120_000)]
    assert found == pytest.approx(expected, rel=1e-10)


def test_rows_that_a_sketch_does_not_know_share_what_is_left() -> None:
    known: NDArray[np.float64] = np.array([50.0, 30.0, 1.0])
    # 19 reads of 7 unknown rows: more each than the least known row has.
    access = TableAccess("t", ("f",), 10, 10, np.array([4, 2, 9]), known, 100.0, error=3.0)
    load = TableLoad(access, 8)
    assert load.lookups == 10
    assert load.segments.probabilities == pytest.approx([0.5, 0.3, 0.025])
    assert load.segments.ends.tolist() == [0, 1, 2, 10]
    assert load.hot_rows(5).tolist() == [4, 2, 9, 0, 1]
    assert load.hot_rows(2).tolist() == [4, 2]

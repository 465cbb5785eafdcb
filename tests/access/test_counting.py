from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recd_plugins.interfaces import access
from recd_plugins.interfaces.access import TableAccess, TableCounter
from recd_plugins.interfaces.distributions import zipf

_ROWS = 40
ids = st.lists(st.integers(0, _ROWS - 1), max_size=60)
batches = st.lists(ids, max_size=6)


@pytest.fixture(autouse=True, scope="module")
def adds_up_often() -> None:
    """Else a counter adds up when it has 65,536 ids."""
    access._PENDING_IDS = 20


def counted(parts: list[list[int]], bound: int) -> TableAccess:
    counter = TableCounter(bound)
    for part in parts:
        counter.add(np.array(part, np.int64))
    return counter.access("t", ("f",), _ROWS, samples=max(1, len(parts)))


def true_counts(parts: list[list[int]]) -> NDArray[np.int64]:
    return np.bincount([id for part in parts for id in part], minlength=_ROWS)


def check(access: TableAccess, truth: NDArray[np.int64], bound: int) -> None:
    assert access.total == truth.sum()
    assert access.error <= access.total / (bound + 1)
    estimate = np.zeros(_ROWS)
    estimate[access.rows] = access.accesses
    assert (estimate <= truth).all()
    assert (truth <= estimate + access.error).all()
    assert (np.diff(access.accesses) <= 0).all()
    assert len(np.unique(access.rows)) == len(access.rows)
    if access.tail_rows:
        spread = access.tail_rows * access.tail_probability * access.samples
        assert access.accesses.sum() + spread == pytest.approx(access.total)


@given(batches, st.integers(1, 12) | st.just(_ROWS))
@settings(max_examples=80)
def test_counts_are_exact_up_to_the_bound(parts: list[list[int]], bound: int) -> None:
    access, truth = counted(parts, bound), true_counts(parts)
    assert len(access.rows) <= bound
    check(access, truth, bound)
    if bound == _ROWS:
        assert access.error == 0
        in_order = sorted(np.flatnonzero(truth), key=lambda row: (-truth[row], row))
        assert access.rows.tolist() == in_order


@given(batches, batches, st.integers(1, 12), st.booleans())
@settings(max_examples=50)
def test_profiles_merge_whether_exact_or_not(
    mine: list[list[int]], theirs: list[list[int]], bound: int, exact: bool
) -> None:
    merged = counted(mine, bound).merge(counted(theirs, _ROWS if exact else bound))
    check(merged, true_counts(mine + theirs), bound)


def test_zipf_mandelbrot() -> None:
    shifted = zipf("t", 100, 3.0, 1.1, shift=20.0).accesses
    for k in (0, 7, 99):
        assert shifted[k] / shifted[0] == pytest.approx(((k + 21) / 21) ** -1.1)
    assert shifted.sum() == pytest.approx(3.0)


def test_rows_are_in_order_or_shuffled() -> None:
    assert zipf("t", 1000, 5, 1).rows.tolist() == list(range(1000))
    shuffled = zipf("t", 1000, 5, 1, seed=3).rows
    assert sorted(shuffled) == list(range(1000))
    assert shuffled.tolist() != list(range(1000))
    np.testing.assert_array_equal(shuffled, zipf("t", 1000, 5, 1, seed=3).rows)

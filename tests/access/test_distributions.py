"""Access profiles made from distributions."""

from __future__ import annotations

import numpy as np
import pytest

from recd_plugins.interfaces.distributions import zipf


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

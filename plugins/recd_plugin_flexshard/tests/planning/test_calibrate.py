"""M and c, from what was measured."""

from __future__ import annotations

import pytest

from recd_plugin_flexshard.planning.calibrate import MemoryPoint, fit_memory


def point(hot: float, accesses: float, *, held: float = 0.0, others: float = 5e6) -> MemoryPoint:
    """What a rank takes where M is 2.5 and c 0.75."""
    peak = others + 2.5 * hot - 0.75 * accesses - held
    return MemoryPoint(hot, accesses, held, peak)


POINTS = [point(0, 0), point(1e6, 3e5), point(1e6, 9e5, held=1e6), point(4e6, 3e5)]


def test_m_and_c_are_found_again() -> None:
    found = fit_memory([*POINTS, point(2e6, 6e5)])
    assert found.memory.memory_multiplier == pytest.approx(2.5)
    assert found.memory.saved_activations == pytest.approx(0.75)
    assert found.error == pytest.approx(0, abs=1e-9)
    # The last point is not fitted: it shows what they are off.
    off = fit_memory([*POINTS, point(2e6, 6e5, others=10e6)])
    assert off.memory == found.memory
    assert off.error == pytest.approx(9.55e6 / 14.55e6 - 1)


def test_they_stay_within_what_the_cost_model_takes() -> None:
    free = [MemoryPoint(p.hot_bytes, p.access_bytes, 0, 5e6) for p in POINTS]
    found = fit_memory([*free, free[-1]]).memory
    assert (found.memory_multiplier, found.saved_activations) == (1, 0)


def test_an_m_of_the_cost_model_has_the_row_wise_copy_too() -> None:
    assert fit_memory([*POINTS, POINTS[0]]).memory.multiplier(4) == pytest.approx(2.75)

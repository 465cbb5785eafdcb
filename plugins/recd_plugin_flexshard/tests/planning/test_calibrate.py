"""M and c, from measured memory."""

from __future__ import annotations

import pytest

from recd_plugin_flexshard.planning.calibrate import MemoryPoint, fit_memory


def point(hot: float, accesses: float, *, held: float = 0.0, others: float = 5e6) -> MemoryPoint:
    """The memory of a rank where M is 2.5 and c 0.75."""
    peak = others + 2.5 * hot - 0.75 * accesses - held
    return MemoryPoint(hot, accesses, held, peak)


POINTS = [point(0, 0), point(1e6, 3e5), point(1e6, 9e5, held=1e6), point(4e6, 3e5)]


def test_m_and_c_are_found_again() -> None:
    memory, error = fit_memory([*POINTS, point(2e6, 6e5)])
    assert memory.memory_multiplier == pytest.approx(2.5)
    assert memory.saved_activations == pytest.approx(0.75)
    assert memory.multiplier(4) == pytest.approx(2.75)
    assert error == pytest.approx(0, abs=1e-9)
    # The last point is not fitted: it shows the error.
    same, off = fit_memory([*POINTS, point(2e6, 6e5, others=10e6)])
    assert same == memory
    assert off == pytest.approx(9.55e6 / 14.55e6 - 1)
    free = [MemoryPoint(p.hot_bytes, p.access_bytes, 0, 5e6) for p in POINTS]
    least, _ = fit_memory([*free, free[-1]])
    assert (least.memory_multiplier, least.saved_activations) == (1, 0)

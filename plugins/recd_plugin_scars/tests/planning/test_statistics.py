from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from torchrec.distributed.types import CacheStatistics

from recd_plugin_scars.planning import BatchRows, TableLoad
from recd_plugin_scars.planning.statistics import AccessStatistics
from recd_plugins.interfaces.distributions import from_weights, zipf


def test_miss_rates_fall_from_all_to_none() -> None:
    load = TableLoad(zipf("t", 1000, 2.0, 1.0), 16)
    statistics = AccessStatistics(load, 128)
    assert isinstance(statistics, CacheStatistics)
    assert statistics.expected_lookups == BatchRows(load, 128).unique
    rates = [statistics.expected_miss_rate(clf) for clf in np.linspace(0, 1, 101)]
    assert (rates[0], rates[-1]) == (1.0, 0.0)
    assert all(later < earlier for earlier, later in pairwise(rates))
    expected = BatchRows(load, 128).cold(250) / BatchRows(load, 128).unique
    assert statistics.expected_miss_rate(0.25) == pytest.approx(expected)
    assert statistics.cacheability == pytest.approx(float(np.trapezoid(rates, dx=0.01)), abs=2e-3)


def test_cacheability_of_the_two_extremes() -> None:
    even = AccessStatistics(TableLoad(from_weights("t", np.ones(400), 1.0), 4), 64)
    assert even.cacheability == pytest.approx(0.5)
    single = from_weights("t", np.array([1.0]), 1.0, num_embeddings=1000)
    assert AccessStatistics(TableLoad(single, 4), 64).cacheability == pytest.approx(0.0005)

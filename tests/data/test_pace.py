"""The rule is what utilisation says without variance, and what is known of two servers with it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recd_plugins.data.stalls import MOST_READERS, Pace

seconds = st.floats(0.001, 10)
readers = st.integers(1, 40)


@settings(max_examples=30, deadline=None)
@given(making=seconds, training=seconds, number=readers, block=st.integers(1, 8))
def test_without_variance_utilisation_alone_counts(making, training, number, block):
    share = Pace(making, training, block=block).stall_share(number)
    assert share == pytest.approx(max(0.0, 1 - number * training / making), abs=2e-3)


@pytest.mark.parametrize(("making", "training"), [(1.0, 1.0), (0.5, 1.0), (3.0, 1.0)])
def test_exponential_times_of_one_reader(making, training):
    """One is made while one is trained on: a turn takes the longer of the two times."""
    turn = making + training - 1 / (1 / making + 1 / training)
    pace = Pace(making, training, making_deviation=making, training_deviation=training)
    assert pace.stall_share(1) == pytest.approx(1 - training / turn, abs=0.015)


@settings(max_examples=30, deadline=None)
@given(
    making=seconds,
    training=seconds,
    spread=st.floats(0, 1),
    target=st.sampled_from([0.01, 0.05, 0.2]),
)
@example(making=1.03125, training=0.001, spread=0.0, target=0.01)
def test_the_fewest_that_keep_the_target(making, training, spread, target):
    pace = Pace(making, training, spread * making, spread * training)
    found = pace.readers_for(target)
    if found is None:
        assert pace.stall_share(MOST_READERS) > target
        return
    assert pace.stall_share(found) <= target
    assert found == 1 or found * training >= (1 - target) * making
    if found < 32 and found > 1:
        assert pace.stall_share(found - 1) > target


def test_unpacking_is_waiting_that_no_reader_takes_away():
    pace = Pace(1.0, 9.0, arrival=1.0)
    assert pace.stall_share(5) == pytest.approx(0.1)
    assert pace.readers_for(0.05) is None
    assert pace.readers_for(0.1) == 1

"""How many readers there are to be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugin_dsi.feed import Window, wanted

TARGET = 0.05


def settle(train: float, make: float, bounds: tuple[int, int]) -> list[int]:
    """Numbers of readers over time, of a trainer and readers that take so many seconds a batch."""
    readers = [bounds[0]]
    for _ in range(40):
        step = max(train, make / readers[-1])
        window = Window(32, 32 * step, 32 * (step - train), 32 * make)
        readers.append(wanted(window, readers[-1], bounds, TARGET))
    return readers


@given(st.floats(0.01, 1), st.floats(0.001, 10), st.integers(1, 4), st.integers(0, 40))
def test_settles_where_the_trainer_need_not_wait(train, make, low, more):
    bounds = low, low + more
    readers = settle(train, make, bounds)
    assert all(bounds[0] <= number <= bounds[1] for number in readers)
    assert readers[-1] == readers[-2], "it does not swing"
    share = 1 - train / max(train, make / readers[-1])
    assert share <= TARGET or readers[-1] == bounds[1]


@given(st.floats(0.01, 1), st.floats(0.001, 10))
def test_takes_no_more_readers_than_it_needs(train, make):
    readers = settle(train, make, (1, 2000))
    assert readers[-1] <= math.ceil(make / train) + 1


@pytest.mark.parametrize(("train", "make", "settled"), [(1.0, 3.2, 4), (1.0, 0.3, 1), (1, 8, 8)])
def test_numbers(train, make, settled):
    assert settle(train, make, (1, 16))[-1] == settled


def test_readers_that_wait_are_taken_away_one_by_one():
    window = Window(32, 32.0, 0.0, 32 * 1.5)
    assert wanted(window, 6, (1, 8), TARGET) == 5
    assert wanted(window, 2, (1, 8), TARGET) == 2

"""What a trainer waits, by what made it wait; time is a clock of the tests'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from recd_plugins.data.stalls import Pace, StallMeter
from recd_plugins.interfaces.batch import STALL_CAUSES, MakingTimes
from recd_plugins.training.measurement import Meter

seconds = st.floats(0, 1e3)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


@dataclass(frozen=True)
class Batch:
    making: MakingTimes


def taking(clock: SimpleNamespace, waits: list[float], making: MakingTimes) -> Iterator[Batch]:
    for wait in waits:
        clock.now += wait
        yield Batch(making)


@given(seconds, seconds, seconds, seconds, seconds, seconds)
def test_causes_add_up_to_the_wait(fill, convert, preprocess, transfer, arrival, waited):
    making = MakingTimes(fill, convert, preprocess, transfer + arrival, arrival)
    causes = making.causes_of(waited)
    assert sum(causes) == pytest.approx(waited)
    assert min(causes) >= 0
    assert causes[STALL_CAUSES.index("transfer")] >= min(arrival, waited) * 0.999


def test_a_turn_is_from_batch_to_batch(clock):
    meter = StallMeter(window=2)
    for _ in meter.metered(taking(clock, [100.0, 1.0, 3.0, 2.0], MakingTimes(fill=1.0))):
        clock.now += 3.0
    # The newest two: 3 + 3 and 3 + 2 seconds.
    recent = meter.recent()
    assert (recent.steps, recent.step_seconds) == (2, 5.5)
    assert recent.seconds == {"fill": 2.5, "convert": 0.0, "preprocess": 0.0, "transfer": 0.0}
    assert recent.share == pytest.approx(5 / 11)
    assert recent.training_seconds == 3.0
    assert meter.taken == 4


def test_the_first_steps_are_left_out_and_steps_that_take_no_batch(clock):
    """A pipeline that reads two batches ahead trains on eight."""
    stalls = StallMeter()
    batches = stalls.metered(taking(clock, [100.0] * 7 + [4.0], MakingTimes(convert=1.0)))
    meter = Meter(torch.nn.Linear(1, 1), torch.device("cpu"), stalls=stalls)
    for step in range(8):
        with meter.step():
            for _ in range(3 if step == 0 else 1):
                next(batches, None)
            clock.now += 6.0
    # Step 6 takes the last batch; 7 and 8 take none.
    found = meter.stalls()
    assert (found.steps, found.step_seconds, found.shares()["convert"]) == (1, 10.0, 0.4)
    assert len(meter.step_seconds()) == 3


positive = st.floats(0.001, 10)


@given(making=positive, training=positive, target=st.sampled_from([0.01, 0.05, 0.2]))
@example(making=1.03125, training=0.001, target=0.01)
def test_the_fewest_that_keep_the_target(making, training, target):
    pace = Pace(making, training)
    found = pace.readers_for(target)
    assert found is not None
    assert pace.stall_share(found) <= target + 1e-6
    assert found == 1 or pace.stall_share(found - 1) > target - 1e-6


def test_unpacking_is_waiting_that_no_reader_takes_away():
    pace = Pace(1.0, 9.0, arrival=1.0)
    assert pace.stall_share(0) == pytest.approx(2 / 11)
    assert pace.stall_share(5) == pytest.approx(0.1)
    assert pace.readers_for(0.05) is None
    assert pace.readers_for(0.1) == 1

"""What a meter counts and times of steps whose pipeline runs dry now and then."""

from __future__ import annotations

import pytest
import torch

from recd_plugins.training.measurement import Meter


@pytest.mark.parametrize(
    ("stretches", "timed", "counted"),
    [
        ([8], 3, True),
        ([7, 7], 2 + 7, True),
        # The second stretch is counted anew; those that cannot be are timed whole.
        ([4, 8], 3, True),
        ([4] * 5, 3 * 4, False),
        ([1] * 5, 3, False),
        ([4, 4, 20], 20, False),
    ],
)
def test_stretches_too_short_to_count_are_timed(stretches, timed, counted):
    meter = Meter(torch.nn.Linear(1, 1), torch.device("cpu"))
    for steps in stretches:
        for _ in range(steps):
            with meter.step():
                pass
        meter.ran_dry()
    assert len(meter.step_seconds()) == timed
    assert (meter.per_step() is not None) == counted

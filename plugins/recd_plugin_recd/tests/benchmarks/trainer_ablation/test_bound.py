"""The bound of a speedup, and the batch that fits a baseline's memory."""

import pytest

from recd_plugin_recd.benchmarks.trainer_ablation.bound import DedupeFactors, speedup_bound
from recd_plugin_recd.benchmarks.trainer_ablation.variants import largest_batch
from recd_plugins.values.stages import StageTimes

FACTORS = DedupeFactors(ids=4, bytes=5, pooling=8)


@pytest.mark.parametrize(
    ("stage", "pooling", "bound"),
    [
        ("lookup", {"gemm": 0, "other": 0}, 4),
        ("all_to_all", {"gemm": 0, "other": 0}, 5),
        ("gemm", {"gemm": 1, "other": 0}, 8),
        ("gemm", {"gemm": 0, "other": 1}, 1),
        ("other", {"gemm": 0, "other": 1}, 8),
        ("other", {"gemm": 1, "other": 0}, 1),
        ("all_reduce", {"gemm": 1, "other": 1}, 1),
    ],
)
def test_a_step_of_one_stage_shrinks_by_that_stages_factor(stage, pooling, bound):
    none = dict.fromkeys(("lookup", "gemm", "all_to_all", "all_reduce", "other"), 0.0)
    times = StageTimes(**{**none, stage: 3.0})
    assert speedup_bound(times, pooling, FACTORS) == pytest.approx(bound)


def test_what_does_not_shrink_bounds_the_speedup():
    times = StageTimes(lookup=4, gemm=16, all_to_all=5, all_reduce=1, other=4)
    left = 1 + (8 / 8 + 8) + 1 + 1 + (1 / 8 + 3)
    assert speedup_bound(times, {"gemm": 0.5, "other": 0.25}, FACTORS) == pytest.approx(30 / left)


@pytest.mark.parametrize(
    ("memory", "multiple"),
    [
        ({1: 50, 2: 80, 3: 101}, 2),
        ({1: 50, 2: 80, 3: 100}, 3),
        ({1: 50, 2: 101, 3: 120}, 1),
        ({1: 101, 2: 120}, 1),
    ],
)
def test_the_largest_batch_within_the_baselines_memory(memory, multiple):
    assert largest_batch(memory, limit=100) == multiple

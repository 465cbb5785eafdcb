"""Figures of an ablation, of trainers that were made up."""

import math

import pytest

from recd_plugin_recd.benchmarks.trainer_ablation.figures import Ablation
from recd_plugin_recd.benchmarks.trainer_ablation.ranks import Measured
from recd_plugin_recd.benchmarks.trainer_ablation.variants import (
    BASELINES,
    COMPILED_CLUSTERED,
    COMPILED_DEDUP,
    INDEX_DEDUP,
    SAME_SAMPLES,
    variants,
)


@pytest.mark.parametrize("apart", [0.25, math.nan])
@pytest.mark.parametrize("variant", SAME_SAMPLES, ids=lambda variant: variant.name)
def test_a_loss_that_differs_or_is_none_is_seen_of_every_trainer(variant, apart):
    found = {v.name: Measured(losses=[0.5] * 5, num_batches=2) for v in SAME_SAMPLES}
    found[variant.name].losses[3] += apart
    assert Ablation("rm1", found).loss_max_abs_diff == pytest.approx(apart, nan_ok=True)


def test_every_trainer_on_equal_samples_is_compared_where_it_trains():
    chosen = variants("reference")
    equal = [v for v in chosen if v.layout == "clustered" and v.batch == v.dim == 1]
    assert set(equal) == set(SAME_SAMPLES)
    found = {v.name: Measured(losses=[0.5] * 4, num_batches=2) for v in SAME_SAMPLES}
    found[INDEX_DEDUP.name] = Measured(failure="no kernel")
    assert Ablation("rm1", found).loss_max_abs_diff == 0


def test_compiled_trainers_are_compared_on_one_table():
    assert COMPILED_CLUSTERED.layout == COMPILED_DEDUP.layout
    assert COMPILED_CLUSTERED in BASELINES

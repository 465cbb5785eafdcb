"""Figures of an ablation, of trainers that were made up."""

import math

import pytest

from recd_plugin_recd.benchmarks.trainer_ablation.figures import Ablation
from recd_plugin_recd.benchmarks.trainer_ablation.ranks import Measured
from recd_plugin_recd.benchmarks.trainer_ablation.variants import SAME_SAMPLES


@pytest.mark.parametrize("apart", [0.25, math.nan])
@pytest.mark.parametrize("variant", SAME_SAMPLES, ids=lambda variant: variant.name)
def test_a_loss_that_differs_or_is_none_is_seen_of_every_trainer(variant, apart):
    found = {v.name: Measured(losses=[0.5] * 5, num_batches=2) for v in SAME_SAMPLES}
    found[variant.name].losses[3] += apart
    assert Ablation("rm1", found).loss_max_abs_diff == pytest.approx(apart, nan_ok=True)

"""Rows of the next batch come while this one is computed, whatever pipeline trains and fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.lookahead_cases import Pipeline, Run, run

from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

HOT = np.arange(8, dtype=np.int64)
AHEAD = TableCache("static", 8 / 64, HOT)
NOT_AHEAD = TableCache("static", 8 / 64, HOT, lookahead=False)


@pytest.mark.parametrize(("world_size", "kind"), [(1, "none"), (2, "ours"), (2, "stock")])
def test_every_pipeline_trains_as_plain_tables(world_size: int, kind: Pipeline) -> None:
    expected = run_on_ranks(run, world_size, "none", None)
    for cache in (AHEAD, NOT_AHEAD):
        for plain, cached in zip(expected, run_on_ranks(run, world_size, kind, cache), strict=True):
            _assert_equal(plain, cached)
            if kind == "ours":
                ahead = "Lookahead" if cache is AHEAD else "SparseDist"
                assert cached.pipeline == f"{ahead}TrainPipeline"


def test_a_rank_without_a_cached_table_looks_ahead_with_the_others() -> None:
    expected, cached = (
        run_on_ranks(run, 2, kind, cache, None, True)
        for kind, cache in (("none", None), ("ours", AHEAD))
    )
    for one, other in zip(expected, cached, strict=True):
        _assert_equal(one, other)
        assert other.pipeline == "LookaheadTrainPipeline"


@pytest.mark.parametrize(
    ("cache", "fails"),
    [(AHEAD, "forward 3"), (AHEAD, "forward 0"), (NOT_AHEAD, "backward 3")],
    ids=["forward", "first", "backward"],
)
def test_training_goes_on_after_a_failed_step(cache: TableCache, fails: str) -> None:
    expected = run_on_ranks(run, 2, "ours", None, fails)
    for plain, cached in zip(expected, run_on_ranks(run, 2, "ours", cache, fails), strict=True):
        assert len(plain.losses) == 7
        _assert_equal(plain, cached)


# Sums of gradients are in any order on a GPU.
TOLERANCE = 1e-6 if DEVICE.type == "cuda" else 0.0


def _assert_equal(plain: Run, cached: Run, tolerance: float = TOLERANCE) -> None:
    assert np.allclose(plain.losses, cached.losses, rtol=0, atol=tolerance)
    assert plain.state.keys() == cached.state.keys()
    for name, values in plain.state.items():
        assert torch.allclose(values, cached.state[name], rtol=0, atol=tolerance), name
    assert cached.num_pinned == 0

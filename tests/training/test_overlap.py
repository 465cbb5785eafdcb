"""Ranks that send while they compute train as those that wait, to the bit.

Their model is that of lookahead_cases: recd_plugin_scars caches a table of it, another is in tiers
of recd_plugin_flexshard.
"""

from __future__ import annotations

import pytest
import torch
from tests.training.lookahead_cases import Pipeline, Run, run
from tests.training.overlap_cases import (
    chosen,
    events,
    load_after_a_pipeline,
    load_after_a_step,
    tables_rest,
    with_a_hook,
)

from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks


@pytest.mark.parametrize("world_size", [1, 3])
def test_it_trains_as_a_loop_that_waits(world_size: int) -> None:
    _assert_equal(world_size)


@pytest.mark.parametrize("rates", [(0.2, 0.05), (0.1,)])
def test_tables_learn_by_the_rate_of_their_step(rates: tuple[float, ...]) -> None:
    _assert_equal(2, rates=rates)


@pytest.mark.parametrize("fails", ["forward 3", "backward 3", "forward 0"])
def test_training_goes_on_after_a_failed_step(fails: str) -> None:
    _assert_equal(2, fails)


def _assert_equal(world_size: int, fails: str | None = None, rates: tuple[float, ...] = ()) -> None:
    kinds: tuple[Pipeline, ...] = ("ours", "overlapped")
    sides: list[list[Run]] = [
        run_on_ranks(run, world_size, kind, None, fails, False, rates) for kind in kinds
    ]
    for waits, overlaps in zip(*sides, strict=True):
        assert (waits.pipeline, overlaps.pipeline) == (
            "SparseDistTrainPipeline",
            "OverlappedTrainPipeline",
        )
        assert overlaps.losses == waits.losses
        assert len(waits.losses) == (7 if fails else 8)
        for name, values in waits.state.items():
            assert torch.equal(values, overlaps.state[name]), name


def test_dense_gradients_are_summed_while_tables_learn_and_the_next_rows_are_looked_up() -> None:
    happened = run_on_ranks(events, 2)[0]
    step = happened[happened.index("forward 1") : happened.index("forward 2")]
    assert step == [
        # Bags', while gradients of sequences travel; then these come.
        *("forward 1", "backward 1", "tables have learned", "sum", "tables have learned"),
        *("look up 2", "sizes of ids 3", "optimizer", "ids 3"),
    ]


def test_a_hook_of_the_trainers_own_stays() -> None:
    ours, overlapped = (run_on_ranks(with_a_hook, 2, kind) for kind in ("ours", "overlapped"))
    for (losses, weights), (others, theirs) in zip(ours, overlapped, strict=True):
        assert losses == others
        assert all(map(torch.equal, weights, theirs))


@pytest.mark.parametrize("kind", ["ours", "overlapped"])
def test_tables_that_are_looked_up_without_gradients_do_not_learn(kind: Pipeline) -> None:
    ((before, after),) = run_on_ranks(tables_rest, 1, kind)
    assert before
    assert all(map(torch.equal, before, after))


def test_weights_that_come_too_late_are_refused() -> None:
    run_on_ranks(load_after_a_step, 2, 0)
    with pytest.raises(ExactnessError, match=r"were loaded when rows .*training\.overlap: false"):
        run_on_ranks(load_after_a_step, 2, 1)
    run_on_ranks(load_after_a_pipeline, 2)


@pytest.mark.parametrize(
    ("asked", "nodes", "expected"),
    [(None, 1, False), (None, 2, DEVICE.type == "cpu"), (False, 2, False), (True, 1, True)],
)
def test_it_is_for_several_nodes_or_who_asks(
    asked: bool | None, nodes: int, expected: bool
) -> None:
    assert run_on_ranks(chosen, 2, asked, local_world_size=2 // nodes) == [expected] * 2

"""Tiers follow the data while training goes on, and training is that without tiers."""

from __future__ import annotations

import pytest

from recd_plugin_flexshard.tests.runtime.retier_cases import (
    EVERY,
    STEPS,
    Drifted,
    Loop,
    backward_after_rows_moved,
    drift,
    look_up_in_any_order,
)
from recd_plugin_flexshard.tests.runtime.state_model import Optimizer
from recd_plugins.testing.gloo import run_on_ranks

TOLERANCE = 1e-6
TIERS = ("hot", "flex", "cold")


@pytest.mark.parametrize("loop", ["plain", "pipelined"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_training_is_that_without_tiers(
    layout: tuple[int, int], optimizer: Optimizer, loop: Loop
) -> None:
    _check(layout, optimizer, loop)


@pytest.mark.parametrize("loop", ["plain", "pipelined"])
def test_evaluation_in_between(loop: Loop) -> None:
    _check((2, 1), "rowwise_adagrad", loop, evaluate=True)


@pytest.mark.parametrize("loop", ["plain", "pipelined"])
def test_checkpoints_in_between(loop: Loop) -> None:
    if loop == "pipelined":
        _check((2, 2), "rowwise_adagrad", loop, save=True)
    _check((2, 1), "sgd", loop, evaluate=True, save=True)


def _check(
    layout: tuple[int, int],
    optimizer: Optimizer,
    loop: Loop,
    *,
    evaluate: bool = False,
    save: bool = False,
) -> None:
    nodes, ranks = layout
    arguments = (optimizer, loop, evaluate, save)
    found = run_on_ranks(drift, nodes * ranks, *arguments, local_world_size=ranks)
    for each in found:
        assert each.loss <= TOLERANCE
        assert each.everything <= TOLERANCE
        assert each.reports == found[0].reports
    _check_reports(found[0])
    # A pipeline distributes batches by new tiers before the rows have moved.
    assert found[0].ahead == 0 if loop == "plain" else found[0].ahead > 1


def _check_reports(found: Drifted) -> None:
    reports = found.reports
    assert [report.step for report in reports] == list(range(EVERY, STEPS, EVERY))
    # Rows move from each tier to each other one.
    assert found.moved.keys() == {(a, b) for a in TIERS for b in TIERS if a != b}
    assert all(report.a2a_share_after < report.a2a_share_before for report in reports)
    for report in reports:
        # Tiers keep their sizes.
        for tier in ("hot", "flex"):
            arrived = sum(count for (_, new), count in report.moved.items() if new == tier)
            left = sum(count for (old, _), count in report.moved.items() if old == tier)
            assert arrived == left
    # Six steps of each distribution: after half of them the tiers are of the one before, and then
    # of this one.
    first_half, second_half = reports[2::2], reports[3::2]
    assert len(first_half) == len(second_half) + 1 == 2
    for stale, fresh in zip(first_half, second_half, strict=False):
        assert fresh.a2a_share_before < stale.a2a_share_before - 0.1


def test_batches_are_looked_up_in_any_order() -> None:
    assert max(run_on_ranks(look_up_in_any_order, 4, local_world_size=2)) <= TOLERANCE


def test_a_backward_pass_after_the_rows_moved_is_refused() -> None:
    for message in run_on_ranks(backward_after_rows_moved, 2, local_world_size=1):
        assert "retier_every" in message

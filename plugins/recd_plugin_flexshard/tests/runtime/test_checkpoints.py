"""Checkpoints of tiered tables are those of the tables: both ways, on any ranks and nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from recd_plugin_flexshard.runtime import RowTiers
from recd_plugin_flexshard.tests.runtime.checkpoint_cases import (
    STEPS,
    Plain,
    fill_after_an_evaluation,
    fill_in_place,
    go_back_to_a_copy,
    go_on_unsharded,
    load_and_go_on,
    load_parts,
    stop_in_between,
    train_and_save,
    train_plainly,
    use_a_state_dict_of_before,
)
from recd_plugin_flexshard.tests.runtime.state_model import TIERS, Optimizer
from recd_plugins.testing.gloo import run_on_ranks

T = TypeVar("T")
TOLERANCE = 1e-6
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "rowwise_adagrad")
OTHER_TIERS = {"a": RowTiers(flex=[30, 31, 0]), "b": RowTiers(hot=range(23))}
# Nodes and ranks of a node.
Layout = tuple[int, int]
# Who saves with tiers and where, and who goes on.
TO_STOCK: list[tuple[Layout, Layout]] = [((2, 1), (1, 4)), ((2, 2), (1, 2)), ((1, 2), (1, 1))]
FROM_STOCK: list[tuple[Layout, Layout]] = [((2, 1), (2, 2)), ((2, 2), (1, 2)), ((1, 2), (2, 1))]


@pytest.fixture(scope="module", params=OPTIMIZERS)
def optimizer(request: pytest.FixtureRequest) -> Optimizer:
    chosen: Optimizer = request.param
    return chosen


@pytest.fixture(scope="module")
def plain(optimizer: Optimizer) -> Plain:
    return run_on_ranks(train_plainly, 2, optimizer)[0]


@pytest.fixture(scope="module")
def saved(
    optimizer: Optimizer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Layout, bool], Path]:
    """Where a training saved its state half way, with tiers or without."""
    folders: dict[tuple[Layout, bool], Path] = {}

    def save(layout: Layout, tiered: bool) -> Path:
        if (layout, tiered) not in folders:
            folders[layout, tiered] = folder = tmp_path_factory.mktemp("saved")
            tiers = TIERS if tiered else None
            _run(layout, train_and_save, optimizer, tiers, folder, tiered)
        return folders[layout, tiered]

    return save


def _run(layout: Layout, function: Callable[..., T], *args: object) -> list[T]:
    nodes, ranks = layout
    return run_on_ranks(function, nodes * ranks, *args, local_world_size=ranks)


@pytest.mark.parametrize(("one", "other"), TO_STOCK, ids=str)
def test_a_stock_job_goes_on(
    saved: Callable[[Layout, bool], Path],
    optimizer: Optimizer,
    plain: Plain,
    one: Layout,
    other: Layout,
) -> None:
    for found in _run(other, load_and_go_on, optimizer, None, saved(one, True), plain):
        assert found.loaded <= TOLERANCE
        assert found.loss <= TOLERANCE
        assert found.everything <= TOLERANCE


@pytest.mark.parametrize("tiered", [False, True], ids=["from stock", "from other tiers"])
@pytest.mark.parametrize("layouts", FROM_STOCK, ids=str)
def test_tiers_go_on(
    saved: Callable[[Layout, bool], Path],
    optimizer: Optimizer,
    plain: Plain,
    layouts: tuple[Layout, Layout],
    tiered: bool,
) -> None:
    one, other = layouts
    tiers = OTHER_TIERS if tiered else TIERS
    for found in _run(other, load_and_go_on, optimizer, tiers, saved(one, tiered), plain):
        assert found.loaded <= TOLERANCE
        assert found.loss <= TOLERANCE
        assert found.everything <= TOLERANCE


def test_an_unsharded_model_goes_on(
    saved: Callable[[Layout, bool], Path], optimizer: Optimizer, plain: Plain
) -> None:
    loaded, last = go_on_unsharded(saved((2, 2), True) / f"step-{STEPS:09d}", plain)
    assert loaded <= TOLERANCE
    if optimizer == "sgd":
        assert last <= TOLERANCE


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_saving_and_loading_do_not_disturb(
    optimizer: Optimizer, layout: Layout, pipelined: bool
) -> None:
    for differences in _run(layout, stop_in_between, optimizer, pipelined):
        assert set(differences.values()) == {0.0}, differences


def test_parts_of_a_state_are_loaded_alone(optimizer: Optimizer) -> None:
    assert _run((2, 1), load_parts, optimizer) == [[], []]


def test_a_copy_of_a_state_dict_is_loaded_back(optimizer: Optimizer) -> None:
    assert _run((2, 2), go_back_to_a_copy, optimizer) == [0.0] * 4


@pytest.mark.parametrize("part", ["weights", "state"])
def test_a_state_dict_that_is_filled_in_place(tmp_path: Path, part: str) -> None:
    assert max(_run((2, 1), fill_in_place, part, tmp_path)) <= TOLERANCE


@pytest.mark.parametrize("part", ["weights", "state"])
def test_a_state_dict_that_is_filled_after_an_evaluation(part: str) -> None:
    assert max(_run((2, 1), fill_after_an_evaluation, part)) <= TOLERANCE


@pytest.mark.parametrize("part", ["weights", "state"])
def test_a_state_dict_of_before_training_is_refused(tmp_path: Path, part: str) -> None:
    for said in _run((2, 2), use_a_state_dict_of_before, part, tmp_path):
        for each in said:
            assert "tables a, b, which have tiers, lack what copies" in each

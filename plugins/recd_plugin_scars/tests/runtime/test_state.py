"""Checkpoints of cached tables are those of plain ones, and have what the fast memory learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recd_plugin_scars.tests.runtime.matrix_cases import SHARDINGS, Case, Training
from recd_plugin_scars.tests.runtime.state_cases import (
    Run,
    convert,
    fill_in_place,
    keep_a_state_dict,
    load_a_part,
    names,
    reset,
    resume,
    round_trip,
    save,
    train_to_the_end,
)
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.device import DEVICE, backend_of_tests
from recd_plugins.testing.gloo import run_on_ranks

MOMENTS = [
    "while rows are gathered",
    "between gather and write-back",
    "in the middle of a write-back",
    "while a checkpoint is written",
]

# Sums of gradients are in any order on a GPU.
TOLERANCE = 1e-6 if DEVICE.type == "cuda" else 0.0
LAUNCHED: dict[str, Any] = {
    "backend": backend_of_tests(2),
    "local_world_size": 2 if DEVICE.type == "cpu" else 1,
}


def case_of(sharding: str, turn: int = 0, *, lookahead: bool = True) -> Case:
    return Case(Training(sharding, "unique", "rowwise_adagrad"), "some", lookahead, turn)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_checkpoints_on_another_number_of_ranks(
    tmp_path: Path, sharding: str, before: int, after: int
) -> None:
    case = case_of(sharding, turn=before)
    for plain, cached in run_on_ranks(save, before, case, tmp_path):
        _assert_equal(plain, cached)
    for first, *others in run_on_ranks(resume, after, case, tmp_path):
        for other in others:
            _assert_equal(first, other)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_from_stock_to_cached_and_back(sharding: str) -> None:
    for turn, lookahead in ((0, True), (1, False)):
        for runs in run_on_ranks(round_trip, 2, case_of(sharding, turn, lookahead=lookahead)):
            for giver, taker in runs:
                _assert_equal(giver, taker)


@pytest.mark.parametrize("lookahead", [True, False])
def test_a_state_dict_that_is_filled_in_place(lookahead: bool) -> None:
    for plain, cached in run_on_ranks(fill_in_place, 2, case_of("row_wise", lookahead=lookahead)):
        _assert_equal(plain, cached)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_state_dict_that_is_kept_stays_that_of_the_tables(sharding: str) -> None:
    for plain, cached in run_on_ranks(keep_a_state_dict, 2, case_of(sharding)):
        _assert_equal(plain, cached)


def test_tables_that_a_state_dict_lacks_keep_what_they_learned() -> None:
    for plain, cached in run_on_ranks(load_a_part, 2, case_of("row_wise")):
        _assert_equal(plain, cached)


def test_tables_that_get_new_first_values_have_them_in_fast_memory_too() -> None:
    for plain, cached in run_on_ranks(reset, 2, case_of("row_wise")):
        _assert_equal(plain, cached)


def test_cached_tables_stay_where_they_are_when_the_model_moves() -> None:
    """To a GPU they would go as a whole, and state dicts would load into what is there."""
    for parameters in run_on_ranks(convert, 2, case_of("row_wise")):
        for name, found in parameters.items():
            tables = ("bags.", "sequences.")
            assert found == (
                (torch.float32, True) if name.startswith(tables) else (torch.float64, False)
            )


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_names_shapes_and_first_weights_are_those_of_stock_tables(sharding: str) -> None:
    for plain, cached in run_on_ranks(names, 2, case_of(sharding)):
        assert cached.weights == plain.weights
        assert cached.parameters == plain.parameters
        assert cached.optimizer == plain.optimizer
        # A GPU draws others.
        for name, weights in plain.first_weights.items() if DEVICE.type == "cpu" else ():
            assert cached.first_weights[name].equal(weights), name


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_loses_nothing_that_a_checkpoint_held(
    tmp_path: Path, uninterrupted: list[list[float]], moment: str
) -> None:
    case = case_of("row_wise", turn=MOMENTS.index(moment))
    with pytest.raises(SetupError, match="killed"):
        launch(train_to_the_end, 2, case, tmp_path, moment, **LAUNCHED)
    resumed = run_on_ranks(train_to_the_end, 2, case, tmp_path, None)
    for rank, (first, losses) in enumerate(resumed):
        assert first == 6
        assert losses == uninterrupted[rank][6:]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    runs = run_on_ranks(train_to_the_end, 2, case_of("row_wise"), folder, None)
    return [losses for _, losses in runs]


def _assert_equal(one: Run, other: Run) -> None:
    assert np.allclose(one.losses, other.losses, rtol=0, atol=TOLERANCE)
    assert one.state.keys() == other.state.keys()
    for name, values in one.state.items():
        assert torch.allclose(values, other.state[name], rtol=0, atol=TOLERANCE), name

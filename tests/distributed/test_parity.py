"""Deduplicated training is plain training: loss, outputs and weights agree after four steps."""

from __future__ import annotations

import pytest
from tests.distributed.parity_cases import (
    Case,
    Difference,
    Optimizer,
    run_case,
    run_cases,
)
from tests.distributed.parity_model import make_batch

from recd_plugins.testing.gloo import run_on_ranks

TOLERANCE = 1e-6
SHARDINGS = ["table_wise", "row_wise", "column_wise", "data_parallel", "mixed"]


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("modules", ["ebc", "ec", "both"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parity(
    world_size: int, sharding: str, modules: str, optimizer: Optimizer, pipelined: bool
) -> None:
    case = Case(sharding, modules, optimizer, pipelined)
    for difference in run_on_ranks(run_case, world_size, case):
        _assert_equal(difference, case)


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
def test_parity_of_table_row_wise_on_two_nodes(pipelined: bool) -> None:
    case = Case("table_row_wise", "ebc", "sgd", pipelined)
    for difference in run_on_ranks(run_case, 4, case, local_world_size=2):
        _assert_equal(difference, case)


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("modules", ["ec", "both"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parity_of_partial_batches(
    world_size: int, sharding: str, modules: str, optimizer: Optimizer, pipelined: bool
) -> None:
    case = Case(sharding, modules, optimizer, pipelined, form="partial")
    for difference in run_on_ranks(run_case, world_size, case):
        _assert_equal(difference, case)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parity_of_data_parallel_tables_among_others(world_size: int) -> None:
    optimizers: tuple[Optimizer, ...] = ("sgd", "rowwise_adagrad")
    cases = [
        Case("among", "both", optimizer, pipelined, overlapped=pipelined)
        for optimizer in optimizers
        for pipelined in (False, True)
    ]
    for differences in run_on_ranks(run_cases, world_size, cases):
        for difference, case in zip(differences, cases, strict=True):
            _assert_equal(difference, case)


def test_a_wrong_gather_is_caught() -> None:
    case = Case("table_wise", "ec", "sgd", False, form="partial", gather_fault=True)
    for difference in run_on_ranks(run_case, 2, case):
        assert difference.output > 1e-3
        assert difference.weight > 1e-3


@pytest.mark.parametrize("sharding", ["row_wise", "mixed"])
def test_parity_of_plain_batches_of_different_sizes(sharding: str) -> None:
    case = Case(sharding, "both", "sgd", True, form="plain")
    for difference in run_on_ranks(run_case, 2, case):
        _assert_equal(difference, case)


@pytest.mark.parametrize("modules", ["ebc", "ec"])
def test_a_wrong_gradient_is_caught(modules: str) -> None:
    case = Case("table_wise", modules, "sgd", False, gradient_fault=True)
    differences = run_on_ranks(run_case, 2, case)
    assert max(difference.weight for difference in differences) > 1e-3


def test_the_batches_have_what_can_go_wrong() -> None:
    factors = [
        [ikjt.dedupe_factor() for ikjt in make_batch(rank, step, form="unique").ikjts]
        for step in range(4)
        for rank in range(2)
    ]
    assert factors[0][0] == 6.0  # one row over and over
    assert factors[2] != factors[3]  # other duplicates on the other rank
    assert factors[4] == factors[5] == [1.0] * 5  # no duplicates
    partials = [
        partial.dedupe_factor()
        for rank in range(2)
        for partial in make_batch(rank, 2, form="partial", moving=True).partials
    ]
    assert min(partials) > 1.2  # though no rows are equal
    lengths = make_batch(0, 1, form="plain").kjt.lengths()
    assert (lengths == 0).any()
    last = make_batch(0, 3, form="plain").kjt.to_dict()
    assert last["p1"].values().numel() == last["s1"].values().numel() == 0


def _assert_equal(difference: Difference, case: Case) -> None:
    assert difference.loss <= TOLERANCE
    assert difference.output <= TOLERANCE
    assert difference.weight <= TOLERANCE
    # Every table and layer learns, or equal weights would say nothing.
    assert min(difference.moved.values()) > 20 * TOLERANCE
    assert difference.num_modules > 0
    assert difference.num_pipelined == (difference.num_modules if case.pipelined else 0)

"""Coalesced training is plain training: loss, outputs and weights agree after four steps."""

from __future__ import annotations

from itertools import product

import pytest
from tests.covering import cells_of_today
from tests.distributed.parity_cases import Case, Difference, Optimizer, run_case, run_cases
from tests.distributed.parity_model import Form

from recd_plugins.testing.gloo import run_on_ranks

TOLERANCE = 1e-6
ALL = ("b0", "b1", "b2", "s0", "s1", "s2", "s3")
SOME = ("b1", "b2", "s0", "s2")


SHARDINGS = ("table_wise", "row_wise", "column_wise")
SETTINGS: tuple[tuple[int, Optimizer], ...] = (
    (1, "sgd"),
    (1, "rowwise_adagrad"),
    (2, "sgd"),
    (2, "rowwise_adagrad"),
    (4, "rowwise_adagrad"),
)
FORMS: tuple[Form, ...] = ("plain", "unique")


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("world_size", "optimizer"), SETTINGS)
def test_parity(world_size: int, sharding: str, optimizer: Optimizer) -> None:
    cells = list(product(SETTINGS, SHARDINGS, ("ebc", "ec"), FORMS, (False, True)))
    cases = [
        Case(sharding, modules, optimizer, pipelined, form=form, coalesced=ALL)
        for setting, by, modules, form, pipelined in cells_of_today(cells)
        if (setting, by) == ((world_size, optimizer), sharding)
    ]
    if world_size == 2:
        cases += [
            Case(sharding, "both", optimizer, True, form=form, coalesced=SOME) for form in FORMS
        ]
    for differences in run_on_ranks(run_cases, world_size, cases):
        for case, difference in zip(cases, differences, strict=True):
            _assert_equal(difference, case)


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
def test_parity_of_table_row_wise_on_two_nodes(pipelined: bool) -> None:
    case = Case("table_row_wise", "ebc", "sgd", pipelined, coalesced=ALL)
    for difference in run_on_ranks(run_case, 4, case, local_world_size=2):
        _assert_equal(difference, case)


def _assert_equal(difference: Difference, case: Case) -> None:
    assert difference.loss <= TOLERANCE, case
    assert difference.output <= TOLERANCE, case
    assert difference.weight <= TOLERANCE, case
    # Every table and layer learns, or equal weights would say nothing.
    assert min(difference.moved.values()) > 20 * TOLERANCE, case
    assert difference.num_modules > 0
    assert difference.num_pipelined == (difference.num_modules if case.pipelined else 0), case

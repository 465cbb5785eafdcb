"""Coalesced tables with a cache train as plain ones without either."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from tests.covering import cells_of_today

from recd_plugin_scars.tests.runtime.matrix_cases import FORMS, SHARDINGS, Case, Training, run_cases
from recd_plugins.testing.gloo import run_on_ranks

TOLERANCE = 1e-6


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_parity(sharding: str) -> None:
    cases = [
        Case(Training(by, form, "rowwise_adagrad"), "some", lookahead, FORMS.index(form), True)
        for by, form, lookahead in cells_of_today(list(product(SHARDINGS, FORMS, (False, True))))
        if by == sharding
    ]
    for differences in run_on_ranks(run_cases, 2, cases):
        for case, difference in zip(cases, differences, strict=True):
            assert difference.output <= TOLERANCE, case
            assert difference.in_flight <= TOLERANCE, case
            assert difference.end <= TOLERANCE, case
            assert difference.moved > 1e-3, case
            assert difference.written_by_evaluation == 0, case


def test_the_backing_store_moves_the_same_rows_for_fewer_lookups() -> None:
    # With nothing kept, which row leaves first does not matter.
    plain = Case(Training("row_wise", "plain", "sgd"), "none", lookahead=False, turn=0)
    cases = [plain, replace(plain, coalesced=True)]
    fewer = 0
    for before, after in run_on_ranks(run_cases, 2, cases):
        for table, traffic in before.traffic.items():
            coalesced = after.traffic[table]
            assert coalesced.unique_rows == traffic.unique_rows
            assert coalesced.bytes_read == traffic.bytes_read
            assert coalesced.bytes_written == traffic.bytes_written
            fewer += traffic.lookups - coalesced.lookups
    assert fewer > 0

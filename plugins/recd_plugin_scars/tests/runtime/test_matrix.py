"""Cached tables train as plain ones, bit for bit.

The matrix: {static, lru, lfu} x {table-, row-, column-wise} x {1, 2 ranks} x {with and without
lookahead} x {KJT, IKJT} x fast memory of {0, 1, some, all} rows x {SGD, row-wise Adagrad}, with
rows in memory and in files, of an EmbeddingBagCollection and an EmbeddingCollection.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from tests.covering import cells_of_today

from recd_plugin_scars.tests.runtime.matrix_cases import (
    FORMS,
    OPTIMIZERS,
    POLICIES,
    ROWS,
    SHARDINGS,
    Case,
    Difference,
    Training,
    run_cases,
)
from recd_plugins.testing.gloo import run_on_ranks


def cases_of(world_size: int, sharding: str) -> list[Case]:
    """The cases of today, of one launch."""
    cells = list(product((1, 2), SHARDINGS, range(2), range(2), range(4), range(2)))
    # With the same rows and lookahead each has another turn, so that all of them meet.
    turns: Counter[tuple[int, int]] = Counter()
    cases = []
    for ranks, by, form, optimizer, rows, lookahead in cells_of_today(cells, together=3):
        training = Training(by, FORMS[form], OPTIMIZERS[optimizer])
        case = Case(training, ROWS[rows], lookahead=bool(lookahead), turn=turns[rows, lookahead])
        turns[rows, lookahead] += 1
        if (ranks, by) == (world_size, sharding):
            cases.append(case)
    return cases


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parity(world_size: int, sharding: str) -> None:
    cases = cases_of(world_size, sharding)
    by_rank = run_on_ranks(run_cases, world_size, cases)
    for case, *differences in zip(cases, *by_rank, strict=True):
        for difference in differences:
            _assert_equal(case, difference)
        _assert_cached(case, differences)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_parity_beside_tables_without_a_cache(sharding: str) -> None:
    training = Training(sharding, "unique", "rowwise_adagrad")
    cases = [
        Case(training, "some", lookahead=True, turn=turn, uncached=uncached)
        for turn, uncached in enumerate((("b0", "s1", "s3"), ("b1", "b2", "s0", "s2")))
    ]
    by_rank = run_on_ranks(run_cases, 2, cases)
    for case, *differences in zip(cases, *by_rank, strict=True):
        for difference in differences:
            _assert_equal(case, difference)
        _assert_cached(case, differences)


def test_the_matrix_has_every_policy_and_storage() -> None:
    tables = ("b0", "b1", "b2", "s0", "s1", "s2", "s3")
    cases = [case for ranks, by in product((1, 2), SHARDINGS) for case in cases_of(ranks, by)]
    for case in cases:
        for kind in "bs":
            policies = {case.policy(table) for table in tables if table[0] == kind}
            assert policies == set(POLICIES)
    met = {
        (case.lookahead, case.rows, case.policy(table), table[0], case.in_file(table))
        for case in cases
        for table in tables
    }
    assert len(met) == 2 * 4 * 3 * 2 * 2


def _assert_equal(case: Case, difference: Difference) -> None:
    assert difference.output == 0, case
    assert difference.in_flight == 0, case
    assert difference.end == 0, case
    # All that was learned is in the state dicts already.
    assert difference.written_by_evaluation == 0, case
    # Training moves the tables, or equal states would say nothing.
    assert difference.moved > 1e-3, case


def _assert_cached(case: Case, differences: list[Difference]) -> None:
    """The rows do move, and only those that the fast memory does not hold."""
    for table in differences[0].traffic | differences[-1].traffic:
        counts = [each.traffic[table] for each in differences if table in each.traffic]
        hits = sum(each.hits for each in counts)
        misses = sum(each.misses for each in counts)
        unique_rows = sum(each.unique_rows for each in counts)
        assert hits + misses == unique_rows > 0, (case, table)
        if case.rows == "all" and case.policy(table) != "lru":
            assert misses == 0, (case, table)
        else:
            assert misses > 0, (case, table)
        if case.rows == "none" and not case.lookahead:
            assert hits == 0, (case, table)
        if case.rows in ("some", "all"):
            assert hits > 0, (case, table)

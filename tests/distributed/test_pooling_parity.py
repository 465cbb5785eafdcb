"""Every built-in pooling trains on unique rows as it trains plainly on all of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tests.covering import cells_of_today
from tests.distributed.parity_cases import Case, Difference, run_cases

from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces import Pooling
from recd_plugins.testing.gloo import run_on_ranks

TOLERANCE = 1e-6
#: Options of every built-in pooling; p2 is a target that is deduplicated, p3 one that is not.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("recd.sum", {}),
    ("recd.mean", {}),
    ("recd.max", {}),
    ("recd.attention", {"heads": 2}),
    ("recd.transformer", {"layers": 2, "heads": 2, "feed_forward": 12}),
    ("recd.transformer", {"norm": "post"}),
    ("recd.din", {"target": "p3"}),
    ("recd.din", {"target": "p2", "weights": "sigmoid", "heads": 2}),
]

FORMS, POOL_ROWS = ("unique", "partial"), ("unique", "all")


def pooling(name: str, options: dict[str, Any]) -> Pooling:
    cls = PluginManager().plugins["pooling"][name].cls
    plugin = cls(cls.Options(**options))
    assert isinstance(plugin, Pooling)
    return plugin


def cases(form: Any, pool_rows: Any) -> list[Case]:
    """The poolings of today, every other one pipelined."""
    today = cells_of_today([*product(range(len(OPTIONS)), FORMS, POOL_ROWS)])
    each = [index for index, *common in today if common == [form, pool_rows]]
    return [
        Case("mixed", "both", "sgd", index % 2 == 1, pooling=pooling(*OPTIONS[index]),
             form=form, pool_rows=pool_rows)
        for index in each
    ]  # fmt: skip


@pytest.mark.parametrize(("form", "pool_rows"), product(FORMS, POOL_ROWS))
def test_parity_of_poolings(form: Any, pool_rows: Any) -> None:
    """Histories are empty, and in the last step whole groups are, on one rank or on both."""
    todo = cases(form, pool_rows)
    for differences in run_on_ranks(run_cases, 2, todo):
        for case, difference in zip(todo, differences, strict=True):
            _assert_equal(case, difference)


def test_the_list_is_complete() -> None:
    assert {name for name, _ in OPTIONS} == set(PluginManager().plugins["pooling"])


def test_a_wrong_gradient_of_a_pooling_is_caught() -> None:
    todo = [
        Case("mixed", "both", "sgd", False, pooling=pooling(*each), gradient_fault=True)
        for each in OPTIONS[3:]
    ]
    for differences in run_on_ranks(run_cases, 2, todo):
        assert all(difference.weight > 1e-3 for difference in differences)


def _assert_equal(case: Case, difference: Difference) -> None:
    assert case.pooling is not None
    name = f"{case.pooling.name} {case.pooling.options}"
    assert difference.loss <= TOLERANCE, name
    assert difference.output <= TOLERANCE, name
    assert difference.weight <= TOLERANCE, name
    # Every table and layer learns, or equal weights would say nothing. Biases of keys cannot.
    assert min(difference.moved.values()) > 20 * TOLERANCE, (name, difference.moved)
    assert difference.num_pipelined == (difference.num_modules if case.pipelined else 0)

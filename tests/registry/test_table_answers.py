"""Answers of plugins by table: of their own tables, and of the type that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from recd_plugins.errors import PluginError
from recd_plugins.registry.table_answers import check_answers

PLUGIN: Any = SimpleNamespace(title="acme.cache")
TABLES: Any = [SimpleNamespace(name="users"), SimpleNamespace(name="items")]


def check(answers: Mapping[str, object]) -> None:
    check_answers(PLUGIN, "caches", answers, TABLES, int, expected="a number")


def test_answers_may_leave_tables_out() -> None:
    check({})
    check({"items": 3})


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"user": 1}, "acme.cache: caches name user, which is none of its tables; did you mean us"),
        ({"zzz": 1}, "caches name zzz, which is none of its tables; its tables: users, items"),
        ({"users": "many"}, "acme.cache: caches of table users are 'many'; expected a number"),
    ],
)
def test_others_are_refused(answers: Mapping[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        check(answers)

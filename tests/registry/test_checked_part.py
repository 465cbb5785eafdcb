"""Table parts as the framework asks them: errors name the entry, its plugin and the method."""

from __future__ import annotations

import math
from inspect import signature
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from recd_plugins.api import (
    PluginError,
    RegistryError,
    RowMemory,
    SetupError,
    Sharding,
    TablePart,
    Work,
)
from recd_plugins.registry import Entry
from recd_plugins.registry.checked_part import (
    _EXPECTED,
    _OF_A_TABLE,
    CheckedPart,
    asked_together,
    by_class,
    one_answer,
)

AT = r"^registry\.yaml:7 sharding\[1\]: "


class Wide(Sharding):
    """Is wide."""

    name = "acme.wide"


class Part(TablePart):
    """Of which each test has one method."""


def checked(part: TablePart) -> CheckedPart:
    return CheckedPart(
        Path("registry.yaml"), Entry(Wide(Wide.Options()), ("t",), "sharding[1]", 7), part
    )


def with_method(method: str, does: Any) -> CheckedPart:
    return checked(type("Part", (Part,), {method: does})())


METHODS = [
    name
    for name, value in vars(TablePart).items()
    if not name.startswith("_") and not isinstance(value, bool)
]


def test_every_method_of_a_part_has_an_expected_result() -> None:
    of_sections = {"as_json", "shown", "with_compute", "__str__"}
    assert {*METHODS, *of_sections} == set(_EXPECTED)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_raises_names_plugin_method_and_line(method: str) -> None:
    def boom(*_: Any) -> Any:
        raise KeyError("boom")

    part = with_method(method, boom)
    match = AT + rf"acme\.wide: {method} failed at .*{Path(__file__).name}:\d+: KeyError: 'boom'"
    with pytest.raises(PluginError, match=match):
        part.asked(method, "t")


@pytest.mark.parametrize("method", sorted({*METHODS} - {"observe"}))
def test_a_result_of_another_type_is_refused(method: str) -> None:
    part = with_method(method, lambda *_: object())
    with pytest.raises(PluginError, match=AT + rf"acme\.wide: {method} returned <obj"):
        part.asked(method, "t")


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("row_memory", 7, "returned 7; expected a RowMemory of bytes or None"),
        ("row_memory", RowMemory(1, 2, -3), r"optimizer=-3\); expected a RowMemory"),
        ("words", "abc", "returned 'abc'; expected a sequence of lines"),
        ("words", [1], r"returned \[1\]; expected a sequence of lines"),
        ("sections", [1], r"returned \[1\]; expected a sequence of Sections"),
        ("sharded_share", 1.5, "returned 1.5; expected a share from 0 to 1"),
        ("fetch_bandwidth", 0, "returned 0; expected bytes a second"),
        ("memory_of_rank", {"copies": 0.5}, "expected bytes by what they are"),
        ("channels", {("0", "alltoall"): "x"}, "kind of collective, which is one of all_to_all"),
        ("channels", {("nobody", "all_to_all"): "x"}, "expected names by process group"),
        ("work", [(0, None)], "expected pairs of a slice of ranks and Work"),
        (
            "work",
            [(slice(None), Work(collectives=-1e9))],
            r"returned Work\.collectives of -1000000000\.0; exp",
        ),
        (
            "work",
            [(slice(None), Work(rows_updated=math.nan))],
            r"returned Work\.rows_updated of nan; expec",
        ),
        (
            "work",
            [(slice(None), Work(steps=math.inf))],
            r"returned Work\.steps of inf; expected a finite",
        ),
        (
            "work",
            [(slice(None), Work(steps=True))],
            r"returned Work\.steps of True; expected a fin",
        ),
        ("ranks", [True], r"returned \[True\]; expected numbers of ranks, at least one, or None"),
        ("collectives", True, "returned True; expected how many, from 0 on"),
        ("sharded_share", True, "returned True; expected a share from 0 to 1"),
        ("activation_bytes", True, "returned True; expected bytes, from 0 on"),
        ("activation_bytes", math.inf, "returned inf; expected bytes, from 0 on"),
        ("activation_bytes", -1e12, "expected bytes, from 0 on"),
        ("figures", {"a": {1}}, r"returned .*; expected JSON values by name \(.* set is not JSON"),
        ("observe", lambda: None, "observe returned .*; expected what pickle takes .*pickle"),
    ],
)
def test_wrong_results_are_refused_in_words(method: str, result: Any, expected: str) -> None:
    part = with_method(method, lambda *_: result)
    with pytest.raises(PluginError, match=expected):
        getattr(part, method)("t") if method not in ("sections", "observe") else part.asked(method)


def test_what_a_plugin_refuses_names_its_entry() -> None:
    def refuse(*_: Any) -> Any:
        raise SetupError("too wide")

    with pytest.raises(RegistryError, match=AT + "too wide$"):
        with_method("work", refuse).work("t", None, None)  # type: ignore[arg-type]


def test_what_is_right_passes() -> None:
    part = checked(TablePart())
    assert part.sharded_share("t") == 1.0
    assert part.words("t") == ()
    assert part.work("t", None, None) == ()  # type: ignore[arg-type]
    assert with_method("words", lambda *_: iter(["one"])).words("t") == ("one",)


@pytest.mark.parametrize("method", sorted(_OF_A_TABLE))
def test_nothing_is_asked_of_a_table_that_the_entry_does_not_claim(method: str) -> None:
    def boom(*_: Any) -> Any:
        raise KeyError("boom")

    arguments: list[Any] = [None] * (len(signature(getattr(TablePart, method)).parameters) - 2)
    part = with_method(method, boom)
    assert getattr(part, method)("u", *arguments) == getattr(TablePart(), method)("u", *arguments)
    with pytest.raises(PluginError, match="boom"):
        getattr(part, method)("t", *arguments)


def test_work_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recd_plugins.registry.checked_part._MOST", 10)
    part = with_method("work", lambda *_: repeat((slice(None), Work())))
    with pytest.raises(PluginError, match=AT + r"acme\.wide: work returned more than 10$"):
        part.work("t", None, None)  # type: ignore[arg-type]


def test_a_class_is_asked_for_all_of_its_parts() -> None:
    class Sums(TablePart):
        @classmethod
        def observe(cls, parts: Any, model: Any, steps: int) -> Any:
            return len(parts) * steps

    parts = [checked(Sums()), checked(TablePart()), checked(Sums())]
    found = by_class(parts)
    assert list(found) == [Sums, TablePart]
    assert asked_together(found[Sums], "observe", None, 5) == 10


def test_two_answers_for_one_table_are_refused() -> None:
    one, none = with_method("fetch_bandwidth", lambda *_: 5.0), checked(TablePart())

    def ask(*parts: CheckedPart) -> float | None:
        return one_answer(parts, "t", "fetch_bandwidth", lambda part: part.fetch_bandwidth("t"))

    assert ask(none, none) is None
    assert ask(none, one, none) == 5.0
    both = r"^table t: acme.wide \(sharding\[1\], line 7\) and acme.wide .* say its fetch_bandwidth"
    with pytest.raises(PluginError, match=both):
        ask(one, one)

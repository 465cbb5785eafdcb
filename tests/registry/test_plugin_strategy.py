"""Table parts as the framework asks them: errors name the entry, its plugin and the method."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from recd_plugins.api import SetupError, Sharding, TableStrategy
from recd_plugins.config import Entry
from recd_plugins.config.entries import _OF_A_TABLE, PluginStrategy, by_class, call_class
from recd_plugins.runtime.errors import RegistryError


class Wide(Sharding):
    """Is wide."""

    name = "acme.wide"


PLUGIN = Wide(Wide.Options()).placed(("registry.yaml", 7, "sharding[1]"))


def checked(part: TableStrategy) -> PluginStrategy:
    entry = Entry(PLUGIN, ("t",), "sharding[1]", 7)
    return PluginStrategy(Path("registry.yaml"), entry, part)


def with_method(method: str, does: Any) -> PluginStrategy:
    return checked(type("Part", (TableStrategy,), {method: does})())


def test_what_a_plugin_refuses_names_its_entry() -> None:
    def refuse(*_: Any) -> Any:
        raise SetupError("'acme.wide' got 1 table, but needs 2. Add a table")

    message = r"^registry\.yaml:7 sharding\[1\]: 'acme.wide' got 1 table"
    with pytest.raises(RegistryError, match=message):
        with_method("work", refuse).work("t", None, None)  # type: ignore[arg-type]


def test_what_is_right_passes() -> None:
    part = checked(TableStrategy())
    assert part.sharded_share("t") == 1.0
    assert part.describe("t") == ()
    assert part.work("t", None, None) == ()  # type: ignore[arg-type]
    assert with_method("describe", lambda *_: iter(["one"])).describe("t") == ("one",)


@pytest.mark.parametrize("method", sorted(_OF_A_TABLE))
def test_nothing_is_asked_of_a_table_that_the_entry_does_not_claim(method: str) -> None:
    def boom(*_: Any) -> Any:
        raise KeyError("boom")

    arguments: list[Any] = [None] * (len(signature(getattr(TableStrategy, method)).parameters) - 2)
    part = with_method(method, boom)
    default = getattr(TableStrategy(), method)("u", *arguments)
    assert getattr(part, method)("u", *arguments) == default
    note = rf"registry\.yaml:7 sharding\[1\]: plugin 'acme\.wide' failed in {method} \(.*gy\.py:"
    with pytest.raises(KeyError, match=note):
        getattr(part, method)("t", *arguments)


def test_a_class_is_asked_for_all_of_its_parts() -> None:
    class Sums(TableStrategy):
        @classmethod
        def observe(cls, parts: Any, model: Any, steps: int) -> Any:
            return len(parts) * steps

    parts = [checked(Sums()), checked(TableStrategy()), checked(Sums())]
    found = by_class(parts)
    assert list(found) == [Sums, TableStrategy]
    assert call_class(found[Sums], "observe", None, 5) == 10

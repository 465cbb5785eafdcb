"""Sections that table parts report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recd_plugins.api import PluginError, Section, Sharding, TableStrategy
from recd_plugins.registry import Entry
from recd_plugins.registry.checked_part import CheckedPart
from recd_plugins.training.measurement import observed_by, sections_of


class Wide(Sharding):
    """Is wide."""

    name = "acme.wide"


ENTRY = Entry(Wide(Wide.Options()), ("*",), "sharding[1]", 7)


class Told(Section):
    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def as_json(self) -> Any:
        return {}

    def shown(self, run: str) -> Any:
        return []


class One(TableStrategy):
    @classmethod
    def sections(cls, parts: Any, run: Any) -> Any:
        return [Told("told")]


class Other(One):
    """Reports the same."""


def sections(*parts: TableStrategy, taken: str = "losses") -> dict[str, Section]:
    checked = [CheckedPart(Path("registry.yaml"), ENTRY, part) for part in parts]
    assembled: Any = SimpleNamespace(
        prepared=SimpleNamespace(checked_parts=checked),
        dmp=SimpleNamespace(module=None, plan=None),
        tables=(),
        setting=object(),
    )
    return sections_of(assembled, None, [observed_by(checked, assembled, 1)], taken={taken})


def test_parts_of_a_class_report_together_and_names_are_those_of_one() -> None:
    assert [*sections(One(), One())] == ["told"]
    with pytest.raises(PluginError, match=r"test_table_parts\.Other reports a section told, which"):
        sections(One(), Other())
    with pytest.raises(PluginError, match=r"One reports a section told"):
        sections(One(), taken="told")

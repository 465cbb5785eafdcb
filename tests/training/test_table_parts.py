"""Sections that table parts report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recd_plugins.api import PluginError, Section, TablePart
from recd_plugins.training.table_parts import observed_by, sections_of


class Told(Section):
    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def as_json(self) -> Any:
        return {}

    def shown(self, run: str) -> Any:
        return []


class One(TablePart):
    @classmethod
    def sections(cls, parts: Any, run: Any) -> Any:
        return [Told("told")]


class Other(One):
    """Reports the same."""


def sections(*parts: TablePart, taken: str = "losses") -> dict[str, Section]:
    assembled: Any = SimpleNamespace(
        prepared=SimpleNamespace(table_parts=parts),
        dmp=SimpleNamespace(module=None, plan=None),
        tables=(),
        setting=object(),
    )
    return sections_of(assembled, None, [observed_by(parts, assembled, 1)], taken={taken})


def test_parts_of_a_class_report_together_and_names_are_those_of_one() -> None:
    assert [*sections(One(), One())] == ["told"]
    with pytest.raises(PluginError, match=r"test_table_parts\.Other reports a section told, which"):
        sections(One(), Other())
    with pytest.raises(PluginError, match=r"One reports a section told"):
        sections(One(), taken="told")

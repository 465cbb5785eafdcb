"""Another sharding for the tables of a registry file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recd_plugins.config.document import read_yaml
from recd_plugins.config.from_file import with_sharding
from recd_plugins.runtime.errors import RegistryError

FIRST = {"use": "a.first", "tables": ["t_1", "t_2"], "options": {"x": 1}}
OTHER = {"use": "a.other", "tables": ["t_2", "t_1"], "options": {"y": 2}, "enabled": False}
THIRD = {"use": "a.third", "tables": ["t_3"]}


def shardings(
    tmp_path: Path, entries: list[dict[str, Any]], name: str, *, chooses: bool = False
) -> list[dict[str, Any]]:
    """The enabled entries with ``name`` in place of the first one."""
    path = tmp_path / "r.yaml"
    path.write_text(f"version: 1\nsharding: {entries}\n".replace("False", "false"))
    changed = with_sharding(read_yaml(path), name, chooses=chooses).data["sharding"]
    return [entry for entry in changed if entry.get("enabled", True)]


def test_options_are_the_defaults_or_those_of_an_entry_for_the_same_tables(tmp_path: Path) -> None:
    new = {"use": "a.new", "tables": ["t_1", "t_2"], "options": {}}
    assert shardings(tmp_path, [FIRST, THIRD], "a.new") == [new, THIRD]
    found = shardings(tmp_path, [FIRST, OTHER, THIRD], "a.other")
    assert found == [{**OTHER, "enabled": True}, THIRD]


@pytest.mark.parametrize("entries", [[], [OTHER]])
def test_no_entry_names_tables(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    with pytest.raises(RegistryError, match=r"whose tables a\.other could take; add one"):
        shardings(tmp_path, entries, "a.other")


def test_what_others_leave_is_for_choosers_alone(tmp_path: Path) -> None:
    rest: dict[str, Any] = {"use": "a.chooser"}
    for entries in ([rest, THIRD], [rest, OTHER, THIRD]):
        with pytest.raises(
            RegistryError, match=r"sharding\[0\]: takes the tables .* give it tables"
        ):
            shardings(tmp_path, entries, "a.new")
    assert shardings(tmp_path, [rest, THIRD], "a.other_chooser", chooses=True)
    assert shardings(tmp_path, [OTHER], "acme", chooses=True) == [{"use": "acme"}]
    assert shardings(tmp_path, [rest, OTHER], "a.new") == [
        {"use": "a.new", "tables": ["*"], "options": {}}
    ]


@pytest.mark.parametrize(
    ("first", "own", "expected"),
    [
        (FIRST, {}, {}),
        (FIRST, {"tables": ["t_4"]}, {"tables": ["t_4", "t_1", "t_2"]}),
        ({"use": "a.chooser"}, {"tables": ["t_4"]}, {}),
    ],
)
def test_a_chooser_that_is_there_takes_the_tables_of_the_first(
    tmp_path: Path, first: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    """What stands in a file once: in another entry it would be there twice."""
    mine = {"use": "acme", "options": {"x": 1}}
    found = shardings(tmp_path, [first, THIRD, {**mine, **own}], "acme", chooses=True)
    assert found == [THIRD, {**mine, **expected, "enabled": True}]

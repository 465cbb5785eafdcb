"""``--sharding NAME``: another sharding for the tables of a registry file."""

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
REST = {"use": "a.chooser"}
NEW = {"use": "a.new", "tables": ["t_1", "t_2"], "options": {}}
ALL = {"use": "acme", "options": {"x": 1}}


@pytest.mark.parametrize(
    ("entries", "name", "expected"),
    [
        # Options are the defaults, or those of an entry for the same tables.
        ([FIRST, THIRD], "a.new", [NEW, THIRD]),
        ([FIRST, OTHER, THIRD], "a.other", [OTHER | {"enabled": True}, THIRD]),
        ([REST, OTHER], "a.new", [NEW | {"tables": ["*"]}]),
        # Choosers need no entry, and take the tables of the first one too.
        ([OTHER], "acme", [{"use": "acme"}]),
        ([FIRST, THIRD, ALL], "acme", [THIRD, ALL | {"tables": ["*"]}]),
        (
            [FIRST, THIRD, ALL | {"tables": ["t_4"]}],
            "acme",
            [THIRD, ALL | {"tables": ["t_1", "t_2", "t_4"]}],
        ),
        ([REST, THIRD, ALL | {"tables": ["t_4"]}], "acme", [THIRD, ALL | {"tables": ["*"]}]),
        ([], "a.other", None),
        ([OTHER], "a.other", None),
    ],
)
def test_the_enabled_entries(
    tmp_path: Path, entries: list[dict[str, Any]], name: str, expected: list[dict[str, Any]] | None
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"version: 1\nsharding: {entries}\n".replace("False", "false"))
    if expected is None:
        with pytest.raises(RegistryError, match=r"that 'a\.other' can replace\. Add an entry"):
            with_sharding(read_yaml(path), name, chooses=False)
        return
    changed = with_sharding(read_yaml(path), name, chooses=name == "acme").data["sharding"]
    enabled = [each for each in changed if each.get("enabled", True)]
    assert [{"enabled": True} | each for each in enabled] == [
        {"enabled": True} | each for each in expected
    ]

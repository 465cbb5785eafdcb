"""The lines that ``auto`` prints, read as a registry file."""

from __future__ import annotations

from pathlib import Path

from recd_plugin_tuning.lines import entry_line
from recd_plugins.api import Candidate
from recd_plugins.registry.document import read_yaml


def test_names_of_any_letters_are_read_back(tmp_path: Path) -> None:
    names = ["t_straße", "t_🎬", 't_"quoted"']
    line = entry_line(Candidate("acme.halves", {"first": names}), names)
    (tmp_path / "r.yaml").write_text(f"sharding:\n{line}\n", encoding="utf-8")
    assert read_yaml(tmp_path / "r.yaml").data["sharding"] == [
        {"use": "acme.halves", "tables": names, "options": {"first": names}}
    ]

"""The registry of its page plans and trains as the page says.

Where recd_plugin_tuning is absent, whose command makes its profiles, this is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from tests.docs.pages import blocks, plan_with, plugin_page, run_console

from recd_plugins.config.manager import PluginManager

PAGE = plugin_page("flexshard")
SHARDINGS = {
    name: found.cls
    for name, found in PluginManager().plugins["sharding"].items()
    if name.startswith("flexshard.")
}


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, *others = blocks(PAGE, "yaml")
    fewer = whole.replace("ranks: 4, ranks_per_node: 2", "ranks: 2, ranks_per_node: 1")
    assert fewer != whole  # two nodes still, in half the time
    (tmp_path / "registry.yaml").write_text(fewer, encoding="utf-8")
    planned, compared, _, _ = run_console(PAGE).values()
    assert " hot" in planned
    assert "tiers of rows" in compared
    for entries in others:
        plan_with(whole, entries)


def test_the_page_names_every_plugin_and_option() -> None:
    assert len(SHARDINGS) == 3
    for name, cls in SHARDINGS.items():
        assert f"| `{name}` |" in PAGE
        for option, field in cls.Options.model_fields.items():
            assert f"| `{option}` | " in PAGE
            for inner in get_args(field.annotation):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    assert all(f"`{key}`" in PAGE for key in inner.model_fields)

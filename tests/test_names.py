"""The framework names no built-in plugin: neither in code nor in messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recd_plugins.config.manager import PluginManager

ROOT = Path(__file__).parents[1]
PLUGINS = PluginManager().plugins
# Of packages: a name of recd-plugins itself has no dot.
NAMES = sorted({name for found in PLUGINS.values() for name in found if "." in name})


@pytest.mark.parametrize("file", sorted(ROOT.glob("src/**/*.py")), ids=lambda file: file.name)
def test_no_plugin_is_named(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"\brecd_plugin_\w+", text)
    # Of a module that is imported, as torchrec.x, more follows.
    named = "|".join(map(re.escape, NAMES))
    assert not re.findall(rf"(?<![\w.])(?:{named})(?![\w.(])", text)

"""The code of docs/measuring.md runs and prints what the page says; entries of torchrec.md load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from recd_plugins.manager import PluginManager

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_the_counter_prints_what_the_page_says(tmp_path: Path) -> None:
    (code,), (output,) = blocks("measuring.md", "python"), blocks("measuring.md", "text")
    (tmp_path / "count.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "count.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == output


def test_the_entries_of_the_torchrec_page_are_valid() -> None:
    registered = PluginManager().plugins
    for block in blocks("plugins/torchrec.md", "yaml"):
        ((kind, entries),) = YAML(typ="safe").load(block).items()
        for entry in entries:
            plugin = registered[kind][entry["use"]].cls
            plugin(plugin.Options.model_validate(entry.get("options", {})))


def test_the_torchrec_page_names_every_plugin_of_the_package() -> None:
    text = (DOCS / "plugins/torchrec.md").read_text()
    names = [
        name
        for kind in ("sharding", "cache")
        for name in PluginManager().plugins[kind]
        if name.startswith("torchrec.")
    ]
    assert len(names) == 6
    assert all(f"`{name}`" in text for name in names)

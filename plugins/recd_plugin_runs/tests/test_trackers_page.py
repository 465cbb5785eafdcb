"""The entries of docs/README.md are valid, and it names all of the package."""

from __future__ import annotations

from ruamel.yaml import YAML
from tests.docs.pages import blocks, plugin_page

from recd_plugins.config.manager import PluginManager

PAGE = plugin_page("runs", "trackers.md")


def test_the_entries_of_the_page_are_valid_and_all_are_there() -> None:
    registered = PluginManager().plugins["callback"]
    for block in blocks(PAGE, "yaml"):
        for entry in YAML(typ="safe").load(block)["callbacks"]:
            plugin = registered[entry["use"]].cls
            plugin(plugin.Options.model_validate(entry["options"]))
    names = [name for name in registered if name.startswith("trackers.")]
    assert len(names) == 5
    for name in names:
        assert f"`{name}`" in PAGE
        for option in registered[name].cls.Options.model_fields:
            assert f"`{option}`" in PAGE

"""The entries of docs/README.md are valid, and it names all of the package."""

from __future__ import annotations

from ruamel.yaml import YAML
from tests.docs.pages import blocks, plugin_page

from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.config.manager import PluginManager

PAGE = plugin_page("ranking")


def test_the_entries_of_the_ranking_page_are_valid() -> None:
    registered = PluginManager().plugins
    for block in blocks(PAGE, "yaml"):
        ((section, entries),) = YAML(typ="safe").load(block).items()
        (kind,) = (kind.name for kind in KINDS if kind.section == section)
        for entry in entries if isinstance(entries, list) else [entries]:
            for each in [entry, *entry.get("wrap", [])]:
                plugin = registered[kind][each["use"]].cls
                plugin(plugin.Options.model_validate(each.get("options", {})))


def test_the_ranking_page_names_every_plugin_of_the_package() -> None:
    found = PluginManager().plugins.values()
    names = [name for plugins in found for name in plugins if name.startswith("ranking.")]
    assert len(names) == 4
    assert all(f"`{name}`" in PAGE for name in names)

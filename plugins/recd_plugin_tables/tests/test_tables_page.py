"""The entries of docs/README.md are valid, and it names all of the package."""

from __future__ import annotations

from ruamel.yaml import YAML
from tests.docs.pages import blocks, plugin_page

from recd_plugin_tables.kinds import ColumnOptions, Role
from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.config.manager import PluginManager

PAGE = plugin_page("tables")


def test_the_entries_of_the_page_are_valid() -> None:
    registered = PluginManager().plugins
    for block in blocks(PAGE, "yaml"):
        ((section, entries),) = YAML(typ="safe").load(block).items()
        (kind,) = (kind.name for kind in KINDS if kind.section == section)
        for entry in entries if isinstance(entries, list) else [entries]:
            plugin = registered[kind][entry["use"]].cls
            plugin(plugin.Options.model_validate(entry.get("options", {})))


def test_the_page_names_every_plugin_option_and_use() -> None:
    plugins = PluginManager().plugins
    mine = [
        plugin.cls
        for kind in ("dataset", "preprocessing")
        for name, plugin in plugins[kind].items()
        if name.startswith("tables.")
    ]
    assert len(mine) == 5
    for plugin in mine:
        assert f" {plugin.name}\n" in PAGE
        assert not [name for name in plugin.Options.model_fields if f"`{name}`" not in PAGE]
    options = [name for name in ColumnOptions.model_fields if name != "roles"]
    assert not [name for name in (*options, *Role.__args__) if f"`{name}`" not in PAGE]

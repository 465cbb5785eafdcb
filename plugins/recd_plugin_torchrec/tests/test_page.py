"""The entries of docs/README.md are valid, and it names all of the package."""

from __future__ import annotations

from ruamel.yaml import YAML
from tests.docs.pages import blocks, plugin_page

from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.config.manager import PluginManager

PAGE = plugin_page("torchrec")


def test_the_entries_of_the_torchrec_page_are_valid() -> None:
    registered = PluginManager().plugins
    for block in blocks(PAGE, "yaml"):
        ((section, entries),) = YAML(typ="safe").load(block).items()
        (kind,) = (kind.name for kind in KINDS if kind.section == section)
        for entry in entries if isinstance(entries, list) else [entries]:
            plugin = registered[kind][entry["use"]].cls
            plugin(plugin.Options.model_validate(entry.get("options", {})))


def test_the_torchrec_page_names_every_plugin_of_the_package() -> None:
    names = [
        name
        for kind in ("sharding", "cache", "optimizer", "metric", "pipeline")
        for name in PluginManager().plugins[kind]
        if name.startswith("torchrec.")
    ]
    assert len(names) == 16
    assert all(f"`{name}`" in PAGE for name in names)

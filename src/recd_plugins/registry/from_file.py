"""Makes a registry of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recd_plugins.interfaces import Converter, Dataset
from recd_plugins.manager import KINDS, PluginManager
from recd_plugins.registry.entries import Entry
from recd_plugins.registry.loader import read_yaml, render
from recd_plugins.registry.registry import Registry
from recd_plugins.registry.resolve import Resolved, resolve
from recd_plugins.registry.schema import FeatureEntrySpec
from recd_plugins.registry.variants import with_sharding


def load_registry(
    path: str | Path, *, plugins_dir: str | Path | None = None, sharding: str | None = None
) -> Registry:
    """Read a registry file, find its plugins and check all of it. Reads no data.

    Args:
        path: the file.
        plugins_dir: a folder of plugin files besides the installed ones.
        sharding: a plugin that takes the tables of the first sharding entry that is enabled, in
            place of that entry's.

    Raises:
        RegistryError: everything that is wrong with the file, with lines.
        PluginError: an installed plugin does not load.
    """
    document = read_yaml(Path(path))
    if sharding is not None:
        document = with_sharding(document, sharding)
    spec, resolved = resolve(document, PluginManager(plugins_dir))
    by_kind: dict[str, list[Resolved]] = {kind: [] for kind in KINDS}
    for item in resolved:
        by_kind[item.kind].append(item)

    def entries(kind: str) -> tuple[Entry[Any], ...]:
        return tuple(
            Entry(
                item.plugin,
                tuple(entry.features if isinstance(entry, FeatureEntrySpec) else entry.tables),
                render(item.location),
                document.lines[item.location],
            )
            for item, entry in zip(by_kind[kind], getattr(spec, kind), strict=True)
            if entry.enabled
        )

    def entry_of(item: Resolved) -> Entry[Any]:
        return Entry(item.plugin, (), render(item.location), document.lines[item.location])

    dataset, *wrappers = by_kind["dataset"]
    converter = by_kind["converter"][0].plugin
    assert isinstance(dataset.plugin, Dataset), "the manager checked its kind"
    assert isinstance(converter, Converter), "the manager checked its kind"
    return Registry(
        path=Path(path),
        spec=spec,
        dataset=dataset.plugin,
        converter=converter,
        preprocessing=entries("preprocessing"),
        pooling=entries("pooling"),
        sharding=entries("sharding"),
        cache=entries("cache"),
        wrappers=tuple(
            entry_of(item)
            for item, wrapper in zip(wrappers, spec.dataset.wrap, strict=True)
            if wrapper.enabled
        ),
        ingestion=next(map(entry_of, by_kind["ingestion"]), None),
    )

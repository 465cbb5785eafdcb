"""Makes a registry of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recd_plugins.manager import PluginManager
from recd_plugins.registry.entries import Entry
from recd_plugins.registry.loader import read_yaml, render
from recd_plugins.registry.registry import TYPED_KINDS, Registry
from recd_plugins.registry.resolve import ResolvedEntry, resolve
from recd_plugins.registry.schema import (
    FeatureEntrySpec,
    PluginSpec,
    RegistrySpec,
    TableEntrySpec,
)
from recd_plugins.registry.variants import with_sharding


def read_registry(
    path: Path, *, plugins_dir: str | Path | None = None, sharding: str | None = None
) -> Registry:
    """The registry of a file: ``recd_plugins.load_registry``."""
    document = read_yaml(path)
    if sharding is not None:
        document = with_sharding(document, sharding)
    found = resolve(document, PluginManager(plugins_dir))
    spec: Any = found.spec

    def enabled(entries: list[ResolvedEntry], section: Any) -> tuple[Entry[Any], ...]:
        specs = section if isinstance(section, list) else [section] if section else []
        return tuple(
            Entry(
                item.plugin, _patterns(spec), render(item.location), document.lines[item.location]
            )
            for item, spec in zip(entries, specs, strict=True)
            if getattr(spec, "enabled", True)
        )

    entries = {
        kind.name: enabled(found.entries[kind.name], getattr(spec, kind.section))
        for kind in found.kinds.values()
    }
    (dataset,), (converter,) = entries["dataset"], entries["converter"]
    return Registry(
        path=path,
        # Without sections of kinds: it travels to readers, who know this class alone.
        spec=RegistrySpec(version=spec.version, model=spec.model, training=spec.training),
        dataset=dataset.plugin,
        converter=converter.plugin,
        preprocessing=entries["preprocessing"],
        pooling=entries["pooling"],
        sharding=entries["sharding"],
        cache=entries["cache"],
        wrappers=enabled(found.wrappers, spec.dataset.wrap),
        ingestion=next(iter(entries["ingestion"]), None),
        kinds=found.kinds,
        further={kind: of_kind for kind, of_kind in entries.items() if kind not in TYPED_KINDS},
    )


def _patterns(spec: PluginSpec) -> tuple[str, ...]:
    if isinstance(spec, FeatureEntrySpec):
        return tuple(spec.features)
    return tuple(spec.tables) if isinstance(spec, TableEntrySpec) else ()

"""Makes a registry of its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recd_plugins.errors import Problem, RegistryError
from recd_plugins.interfaces import Chooser, Sharding
from recd_plugins.manager import PluginManager
from recd_plugins.registry.entries import Entry
from recd_plugins.registry.loader import read_yaml, render
from recd_plugins.registry.no_data import NoConverter, NoDataset
from recd_plugins.registry.resolve import ResolvedEntry, is_chooser, resolve
from recd_plugins.registry.run_config import TYPED_KINDS, RunConfig
from recd_plugins.registry.schema import (
    FeatureEntrySpec,
    PluginSpec,
    RegistrySpec,
    TableEntrySpec,
)
from recd_plugins.registry.settings import with_settings
from recd_plugins.registry.variants import with_sharding


def load_registry(
    path: str | Path,
    *,
    plugins_dir: str | Path | None = None,
    sharding: str | None = None,
    settings: Sequence[str] = (),
    needs_data: bool = True,
    text: str | None = None,
) -> RunConfig:
    """Read a registry file, find its plugins and check all of it. Reads no data.

    Args:
        path: the file.
        plugins_dir: a folder of plugin files besides the installed ones.
        sharding: a plugin that takes the tables of the first sharding entry that is enabled, in
            place of that entry's.
        settings: values in place of the file's, each as ``training.learning_rate=0.05``.
        needs_data: without it the file may leave out both of the sections ``dataset`` and
            ``converter``, unless another section is about their rows.
        text: what the file held when it was read before, in place of what it holds now.

    Raises:
        RegistryError: everything that is wrong with the file, with lines.
        PluginError: an installed plugin does not load.
    """
    path = Path(path)
    document = with_settings(read_yaml(path, text=text), settings)
    manager = PluginManager(plugins_dir)
    if sharding is not None:
        document = with_sharding(document, sharding, chooses=is_chooser(manager, sharding))
    # What is there of these is made of the dataset's rows alone, and would be ignored without it.
    of_data = {"dataset", "converter", "preprocessing", "ingestion"}
    needs_data = needs_data or not of_data.isdisjoint(document.data)
    found = resolve(document, manager, needs_data=needs_data)
    spec: Any = found.spec

    def enabled(entries: list[ResolvedEntry], section: Any) -> tuple[Entry[Any], ...]:
        specs = section if isinstance(section, list) else [section] if section else []
        specs = [spec for spec in specs if isinstance(spec, PluginSpec)]
        return tuple(
            Entry(
                item.plugin,
                _patterns(spec),
                render(item.location),
                document.lines.get(item.location, 0),
            )
            for item, spec in zip(entries, specs, strict=True)
            if getattr(spec, "enabled", True)
        )

    entries = {
        kind.name: enabled(found.entries[kind.name], getattr(spec, kind.section))
        for kind in found.kinds.values()
    }
    data: dict[str, Any] = {
        kind: entries[kind][0].plugin for kind in ("dataset", "converter") if entries[kind]
    }
    model = None if entries["model"] else spec.model
    choosers = [entry for entry in entries["sharding"] if entry.yields]
    if len(choosers) > 1:
        first, second = choosers[:2]
        problem = (
            f"{first.plugin.name} stands in {first.field} (line {first.line}) already, and chooses "
            "for all its tables together: keep one, with the patterns of both, or give one "
            "enabled: false"
        )
        raise RegistryError([Problem(str(path), second.line, second.field, problem)])
    shardings: Any = manager.plugins["sharding"].values() if choosers else ()
    return RunConfig(
        path=path,
        text=document.text,
        # Without sections of kinds: it travels to readers, who know this class alone.
        spec=RegistrySpec(version=spec.version, model=model, training=spec.training),
        dataset=data.get("dataset", NoDataset()),
        converter=data.get("converter", NoConverter()),
        preprocessing=entries["preprocessing"],
        pooling=entries["pooling"],
        sharding=entries["sharding"],
        cache=entries["cache"],
        wrappers=enabled(found.wrappers, spec.dataset.wrap) if spec.dataset else (),
        ingestion=next(iter(entries["ingestion"]), None),
        kinds=found.kinds,
        offering=_offering([each.cls for each in shardings]),
        unloaded=tuple(each.reason for each in manager.broken) if choosers else (),
        further={kind: of_kind for kind, of_kind in entries.items() if kind not in TYPED_KINDS},
    )


def registry_without_file() -> RunConfig:
    """A registry without data and without entries, of a trainer that brings all it needs."""
    return RunConfig(
        path=Path("wrap()"),
        spec=RegistrySpec(version=1),
        dataset=NoDataset(),
        converter=NoConverter(),
        preprocessing=(),
        pooling=(),
        sharding=(),
        cache=(),
    )


def _offering(classes: list[type[Sharding]]) -> tuple[type[Sharding], ...]:
    """Those that a chooser may choose, the simplest first."""
    return tuple(sorted((c for c in classes if not issubclass(c, Chooser)), key=_simplest_first))


def _simplest_first(cls: type[Sharding]) -> tuple[bool, str]:
    """Of equally good ones a chooser takes the first: what leaves modules as they are."""
    return cls.rewrite is not Sharding.rewrite, cls.name


def _patterns(spec: PluginSpec) -> tuple[str, ...]:
    if isinstance(spec, FeatureEntrySpec):
        return tuple(spec.features)
    return tuple(spec.tables) if isinstance(spec, TableEntrySpec) else ()

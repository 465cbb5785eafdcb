"""Reads a registry file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from recd_plugins.errors import Problem, RegistryError
from recd_plugins.interfaces import Chooser, Sharding
from recd_plugins.manager import PluginManager
from recd_plugins.registry.document import Document, read_yaml, render, with_settings
from recd_plugins.registry.entries import Entry
from recd_plugins.registry.resolve import ResolvedEntry, is_chooser, resolve
from recd_plugins.registry.run_config import TYPED_KINDS, NoConverter, NoDataset, RunConfig
from recd_plugins.registry.schema import (
    FeatureEntrySpec,
    PluginSpec,
    RegistrySpec,
    TableEntrySpec,
)

_BOOL = TypeAdapter(bool)


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
        document=document,
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


def with_sharding(document: Document, name: str, *, chooses: bool) -> Document:
    """The document with the plugin ``name`` in place of its first ``sharding`` entry.

    An entry of that plugin for the same ``tables``, enabled or not, says its options; without one
    they are the plugin's defaults. A chooser stands in a file once: one that is there already takes
    the first entry's tables besides its own.

    Args:
        document: of a registry file.
        name: of the plugin.
        chooses: whether it is a chooser, which takes all tables that are left.

    Raises:
        RegistryError: no entry is enabled, so that no tables are named; or the first one takes what
            others leave, as a chooser alone can.
    """
    entries = document.data.get("sharding")
    entries = list(entries) if isinstance(entries, list) else []
    first = next((i for i, entry in enumerate(entries) if _enabled(entry)), None)
    if first is None and chooses:
        entries.append({"use": name})
        return replace(document, data={**document.data, "sharding": entries})
    if first is None:
        raise RegistryError(
            [
                document.problem(
                    ("sharding",),
                    f"has no entry that is enabled, whose tables {name} could take; add one",
                )
            ]
        )
    tables = entries[first].get("tables")
    other = next((i for i, entry in enumerate(entries) if _is(entry, name, tables)), None)
    if other is None and chooses:
        enabled = [i for i, entry in enumerate(entries) if _enabled(entry)]
        other = next((i for i in enabled if entries[i].get("use") == name), None)
        if other is not None:
            entries[other] = _with_tables(entries[other], tables)
    if other is None and tables is None and not chooses and sum(map(_enabled, entries)) > 1:
        raise RegistryError(
            [
                document.problem(
                    ("sharding", first),
                    f"takes the tables that other entries leave, which {name} in its place cannot: "
                    "give it tables",
                )
            ]
        )
    if other is None:
        entries[first] = {"tables": ["*"], **entries[first], "use": name, "options": {}}
    else:
        entries[first] = {**entries[first], "enabled": False}
        entries[other] = {**entries[other], "enabled": True}
    return replace(document, data={**document.data, "sharding": entries})


def _enabled(entry: Any) -> bool:
    """Whether an entry is by the schema, to which ``yes`` is true; what is neither it refuses."""
    try:
        return isinstance(entry, dict) and _BOOL.validate_python(entry.get("enabled", True))
    except ValidationError:
        return False


def _is(entry: Any, name: str, tables: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("use") == name
        and _in_any_order(entry.get("tables")) == _in_any_order(tables)
    )


def _with_tables(entry: dict[str, Any], tables: Any) -> dict[str, Any]:
    """A chooser's entry that takes these too; without tables it takes all that others leave."""
    own = entry.get("tables")
    if tables is None:
        return {key: value for key, value in entry.items() if key != "tables"}
    if isinstance(own, list) and isinstance(tables, list):
        return {**entry, "tables": [*own, *tables]}
    return entry


def _in_any_order(tables: Any) -> Any:
    return sorted(map(str, tables)) if isinstance(tables, list) else tables

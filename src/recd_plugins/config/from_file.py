"""Reading and validating ``registry.yaml`` files."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from recd_plugins.config.document import (
    Document,
    Location,
    read_yaml,
    render,
    short_repr,
    with_settings,
)
from recd_plugins.config.entries import Entry
from recd_plugins.config.manager import PluginManager, Registered
from recd_plugins.config.run_config import (
    TYPED_KINDS,
    NoConverter,
    NoDataset,
    RunConfig,
    two_readers,
)
from recd_plugins.config.schema import (
    FeatureEntrySpec,
    PluginSpec,
    RegistrySpec,
    TableEntrySpec,
    registry_spec,
)
from recd_plugins.interfaces import Chooser, DatasetWrapper, Kind, Plugin, PluginOptions, Sharding
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.runtime.text import did_you_mean


def load_registry(
    path: str | Path,
    *,
    plugins_dir: str | Path | None = None,
    sharding: str | None = None,
    settings: Sequence[str] = (),
    needs_data: bool = True,
    text: str | None = None,
) -> RunConfig:
    """Read a registry file, find its plugins and validate it, without reading data.

    Args:
        path: the file.
        plugins_dir: folder with plugin files, in addition to installed packages.
        sharding: plugin name that replaces ``use`` of the first enabled ``sharding`` entry.
        settings: ``KEY=VALUE`` overrides, such as ``training.learning_rate=0.05``.
        needs_data: whether the sections ``dataset`` and ``converter`` are required even if the file
            has no other section about data.
        text: text to parse instead of reading the file.

    Raises:
        RegistryError: the file is invalid. The error lists all problems with their lines.
        PluginError: a plugin cannot be loaded.
    """
    path = Path(path)
    document = with_settings(read_yaml(path, text=text), settings)
    manager = PluginManager(plugins_dir)
    if sharding is not None:
        document = with_sharding(document, sharding, chooses=is_chooser(manager, sharding))
    of_data = {"dataset", "converter", "preprocessing", "ingestion"}
    needs_data = needs_data or not of_data.isdisjoint(document.data)
    kinds = manager.kinds_for(document.data)
    spec, plugins = _validated(document, manager, kinds, needs_data)

    def enabled(section: Any, *at: str) -> tuple[Entry[Any], ...]:
        specs: dict[Location, Any] = {at: section}
        if isinstance(section, list):
            specs = {(*at, number): each for number, each in enumerate(section)}
        return tuple(
            Entry(plugins[place], _patterns(each), render(place), document.lines.get(place, 0))
            for place, each in specs.items()
            if isinstance(each, PluginSpec) and getattr(each, "enabled", True)
        )

    entries = {
        kind.name: enabled(getattr(spec, kind.section), kind.section) for kind in kinds.values()
    }
    data: dict[str, Any] = {
        kind: entries[kind][0].plugin for kind in ("dataset", "converter") if entries[kind]
    }
    model = None if entries["model"] else spec.model
    choosers = [entry for entry in entries["sharding"] if entry.yields]
    if len(choosers) > 1:
        first, second = choosers[:2]
        problem = (
            f"{first.plugin.name} is already used in {first.field} (line {first.line}). Merge the "
            "two entries into one with the table patterns of both"
        )
        raise RegistryError([Problem(str(path), second.line, second.field, problem)])
    shardings: Any = manager.plugins["sharding"].values() if choosers else ()
    offering = [each.cls for each in shardings if not issubclass(each.cls, Chooser)]
    offering.sort(key=lambda cls: (cls.rewrite is not Sharding.rewrite, cls.name))
    return RunConfig(
        path=path,
        document=document,
        # Without sections of kinds, as readers unpickle it.
        spec=RegistrySpec(version=spec.version, model=model, training=spec.training),
        dataset=data.get("dataset", NoDataset(PluginOptions())),
        converter=data.get("converter", NoConverter(PluginOptions())),
        preprocessing=entries["preprocessing"],
        pooling=entries["pooling"],
        sharding=entries["sharding"],
        cache=entries["cache"],
        wrappers=enabled(spec.dataset.wrap, "dataset", "wrap") if spec.dataset else (),
        ingestion=next(iter(entries["ingestion"]), None),
        kinds=kinds,
        offering=tuple(offering),
        further={kind: of_kind for kind, of_kind in entries.items() if kind not in TYPED_KINDS},
    )


def registry_without_file() -> RunConfig:
    """Return the config of a training script without ``registry.yaml``: no dataset, no plugins."""
    return RunConfig(
        path=Path("wrap()"),
        spec=RegistrySpec(version=1),
        dataset=NoDataset(PluginOptions()),
        converter=NoConverter(PluginOptions()),
        preprocessing=(),
        pooling=(),
        sharding=(),
        cache=(),
    )


def _patterns(spec: PluginSpec) -> tuple[str, ...]:
    if isinstance(spec, FeatureEntrySpec):
        return tuple(spec.features)
    return tuple(spec.tables) if isinstance(spec, TableEntrySpec) else ()


def with_sharding(document: Document, name: str, *, chooses: bool) -> Document:
    """Return a copy with the plugin ``name`` in the first enabled ``sharding`` entry.

    If another entry, even a disabled one, has this plugin and the ``tables`` of the replaced entry,
    it is enabled instead, with its options. Otherwise, the options are the defaults. A plugin that
    ``chooses`` other plugins takes the tables of both entries. It is added if no entry is enabled.

    Raises:
        RegistryError: no entry is enabled, and the plugin is not a chooser.
    """
    entries = document.data.get("sharding")
    entries = list(entries) if isinstance(entries, list) else []
    enabled = [i for i, each in enumerate(entries) if _enabled(each)]
    if not enabled and chooses:
        entries.append({"use": name})
        return replace(document, data={**document.data, "sharding": entries})
    if not enabled:
        problem = f"no entry is enabled that {name!r} can replace. Add an entry with use: {name}"
        raise RegistryError([document.problem(("sharding",), problem)])
    first = enabled[0]
    tables = _tables_of(entries[first])
    same = [
        i for i, each in enumerate(entries) if isinstance(each, dict) and each.get("use") == name
    ]
    other = next((i for i in same if _tables_of(entries[i]) == tables), None)
    if other is None and chooses and (other := next((i for i in same if i in enabled), None)):
        # Without `tables`, a chooser gets all tables that no other entry matches.
        both = tables and _tables_of(entries[other])
        entries[other] = {**entries[other], "tables": sorted({*tables, *both}) if both else ["*"]}
    if other is None:
        entries[first] = {"tables": ["*"], **entries[first], "use": name, "options": {}}
    else:
        entries[first] = {**entries[first], "enabled": False}
        entries[other] = {**entries[other], "enabled": True}
    return replace(document, data={**document.data, "sharding": entries})


def _enabled(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("enabled", True) is True


def _tables_of(entry: dict[str, Any]) -> list[str]:
    tables = entry.get("tables")
    return sorted(map(str, tables)) if isinstance(tables, list) else []


def _validated(
    document: Document, manager: PluginManager, kinds: Mapping[str, Kind], needs_data: bool
) -> tuple[Any, dict[Location, Plugin]]:
    """Return the validated file, and the plugin object of every entry by location."""
    problems: list[Problem] = []
    model = registry_spec(kinds.values(), document.data, needs_data=needs_data)
    spec = None
    try:
        spec = model.model_validate(_with_all_tables(document.data, manager))
    except ValidationError as error:
        problems += schema_problems(document, (), model, "key", error)
    plugins: dict[Location, Plugin] = {}
    for kind, location, entry in _entries(document, kinds.values()):
        try:
            plugins[location] = _plugin(document, manager, kind, location, entry)
        except RegistryError as error:
            problems += error.problems
    ingestion = document.data.get("ingestion")
    if spec is not None and ingestion and spec.training.workers:
        wrong = two_readers(ingestion["use"], spec.training.workers)
        problems.append(document.problem(("training", "workers"), wrong))
    if problems or spec is None:
        raise RegistryError(sorted(problems, key=lambda problem: problem.line))
    return spec, plugins


def is_chooser(manager: PluginManager, name: str) -> bool:
    """Return whether a sharding plugin is a ``Chooser``, which selects other plugins."""
    found = manager.find("sharding", name)
    return found is not None and issubclass(found.cls, Chooser)


def _with_all_tables(data: dict[str, Any], manager: PluginManager) -> dict[str, Any]:
    """Add ``tables: ["*"]`` to sharding entries whose plugin is a chooser or not installed."""

    def written(entry: Any) -> Any:
        name = entry.get("use") if isinstance(entry, dict) else None
        if not isinstance(name, str) or "tables" in entry:
            return entry
        try:
            has_all = manager.find("sharding", name) is None or is_chooser(manager, name)
        except PluginError:  # reported later with the line of the entry
            has_all = True
        return {"tables": ["*"], **entry} if has_all else entry

    entries = data.get("sharding")
    return {**data, "sharding": list(map(written, entries))} if isinstance(entries, list) else data


def _entries(
    document: Document, kinds: Iterable[Kind]
) -> Iterator[tuple[Kind, Location, dict[str, Any]]]:
    """Yield the kind, location and content of every entry that names a plugin."""
    for kind in kinds:
        yield from ((kind, *each) for each in _in_section((kind.section,), document.data))
        dataset = document.data.get("dataset")
        if kind.name == "dataset" and isinstance(dataset, dict):
            for location, entry in _in_section(("wrap",), dataset):
                yield kind, ("dataset", *location), entry


def _in_section(
    section: tuple[str], data: dict[str, Any]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    found = data.get(section[0])
    numbered = enumerate(found) if isinstance(found, list) else [(None, found)]
    for index, entry in numbered:
        if isinstance(entry, dict) and isinstance(entry.get("use"), str):
            yield section if index is None else (*section, index), entry


def _plugin(
    document: Document,
    manager: PluginManager,
    kind: Kind,
    location: Location,
    entry: dict[str, Any],
) -> Plugin:
    name = entry["use"]
    try:
        registered = manager.find(kind.name, name)
    except PluginError as error:  # of its package
        raise RegistryError([document.problem((*location, "use"), str(error))]) from error
    if registered is None or not _belongs(registered, location):
        message = _unknown_plugin(manager, kind, location, name)
        raise RegistryError([document.problem((*location, "use"), message)])
    options = entry.get("options", {})
    if not isinstance(options, dict):
        options = {}  # the schema reports it
    cls = registered.cls
    inside = (*location, "options")
    at = document.problem(location, "")
    stands_at = (at.path, at.line, at.field)
    unmade = Plugin(PluginOptions()).placed(stands_at)
    unmade.name = name  # type: ignore[misc]  # for notes
    try:
        with plugin_call(unmade, "__init__", cls), redirect_stdout(sys.stderr):
            made = cls(cls.Options.model_validate(options))
    except ValidationError as error:
        raise RegistryError(
            schema_problems(document, inside, cls.Options, f"option of {name!r}", error)
        ) from error
    except (RecdError, ValueError) as error:
        raise RegistryError([document.problem(inside, str(error))]) from error
    return made.placed(stands_at)


def _belongs(found: Registered, location: Location) -> bool:
    return issubclass(found.cls, DatasetWrapper) == ("wrap" in location)


def _unknown_plugin(manager: PluginManager, kind: Kind, location: Location, name: str) -> str:
    for other, plugins in manager.plugins.items():
        if name in plugins:
            what = "wrapper" if issubclass(plugins[name].cls, DatasetWrapper) else other
            section = "dataset.wrap" if what == "wrapper" else manager.kinds[other].section
            return f"{name!r} is a {what} plugin. Move this entry to the section {section}:"
    of_kind = manager.plugins.get(kind.name, {})
    usable = sorted(each for each, found in of_kind.items() if _belongs(found, location))
    message = f"no {'wrapper' if 'wrap' in location else kind.name} plugin is named {name!r}" + (
        did_you_mean(name, usable)
        or (
            f". Use one of these: {', '.join(map(repr, usable)) or 'none'}. Otherwise install the "
            f"package of {name!r}, or set --plugins-dir to the folder of its file"
        )
    )
    if manager.broken:
        reasons = "; ".join(each.reason for each in manager.broken)
        message += f". Some plugin packages failed to load: {reasons}"
    return message


def schema_problems(
    document: Document,
    base: Location,
    model: type[BaseModel],
    what: str,
    error: ValidationError,
) -> list[Problem]:
    """Convert a pydantic error to a list of errors with line numbers.

    ``base`` is the location of the validated value in the file. ``what`` is a noun for a key of the
    value, such as ``key`` or ``option of 'acme.hash'``.
    """
    data: Any = document.data
    for part in base:
        data = data.get(part, {}) if isinstance(data, dict) else data[part]
    found: dict[tuple[Location, str], Problem] = {}
    errors = error.errors(include_url=False)
    invalid = {each["loc"][:-1] for each in errors}
    for details in errors:
        if details["type"] == "too_short" and details["loc"] in invalid:
            continue  # pydantic does not count invalid items
        inside = _inside(data, details)
        location = (*base, *inside)
        problem = document.problem(location, _describe(details, inside, model, what))
        found[(location, details["type"])] = problem
    return list(found.values())


def _inside(data: Any, details: ErrorDetails) -> Location:
    """Return the location of an error, without the names of union members from pydantic."""
    location: list[str | int] = []
    for part in details["loc"]:
        if isinstance(data, dict) and part in data:
            data = data[str(part)]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif details["type"] == "missing" and part == details["loc"][-1]:
            pass
        else:
            continue
        location.append(part)
    return tuple(location)


def _describe(details: ErrorDetails, inside: Location, model: type[BaseModel], what: str) -> str:
    kind, got = details["type"], details["input"]
    if kind == "missing":
        return f"this required {what} is missing"
    if kind == "extra_forbidden":
        known = list(_fields(model, inside[:-1]))
        meant = did_you_mean(str(inside[-1]), known)
        if not known:
            return f"unknown {what}. Remove this key, since no keys are allowed here"
        return f"unknown {what}" + (meant or f". Use one of these: {', '.join(map(repr, known))}")
    if kind == "value_error":
        return details["msg"].removeprefix("Value error, ")
    message = details["msg"][:1].lower() + details["msg"][1:]
    if kind in ("dict_type", "model_type"):
        message = "input should be a mapping of keys to values"
    if kind in ("list_type", "tuple_type"):
        message = "expected a list"
    if got is None:
        return f"{message}, but the value is empty. Remove the key, or write a value"
    known = re.findall("'([^']*)'", details["ctx"]["expected"]) if kind == "literal_error" else []
    return f"{message}, got {short_repr(got)}{did_you_mean(str(got), known)}"


def _fields(model: type[BaseModel] | None, location: Location) -> Mapping[str, FieldInfo]:
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return {} if model is None else model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first pydantic model in a type annotation, such as ``list[Model]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)

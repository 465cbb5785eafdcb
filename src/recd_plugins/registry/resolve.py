"""Checks a registry document against its schema and the plugins that are there."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from recd_plugins.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.interfaces import (
    Chooser,
    DatasetWrapper,
    Kind,
    Plugin,
    PluginOptions,
)
from recd_plugins.manager import PluginManager, Registered
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry.document import Document, Location, short_repr
from recd_plugins.registry.schema import RegistrySpec, registry_spec
from recd_plugins.words import closest, did_you_mean


@dataclass(frozen=True)
class ResolvedEntry:
    """One entry of a document, enabled or not, with the plugin it names."""

    location: Location
    plugin: Plugin


@dataclass(frozen=True)
class Resolved:
    """A document that is as it should be.

    Attributes:
        kinds: that its sections may be of, by name.
        spec: the document.
        entries: by kind, in the order of the file.
        wrappers: of the dataset.
    """

    kinds: Mapping[str, Kind]
    spec: RegistrySpec
    entries: Mapping[str, list[ResolvedEntry]]
    wrappers: list[ResolvedEntry]


def resolve(document: Document, manager: PluginManager, *, needs_data: bool = True) -> Resolved:
    """Validate everything, then make the plugin of every entry.

    Args:
        document: of a registry file.
        manager: of the plugins that it may name.
        needs_data: whether the sections ``dataset`` and ``converter`` have to be there.

    Raises:
        RegistryError: everything that is wrong, in the order of lines.
        PluginError: what the document names cannot be used.
    """
    problems: list[Problem] = []
    kinds = manager.kinds_for(document.data)
    model = registry_spec(kinds.values(), document.data, needs_data=needs_data)
    spec = None
    try:
        spec = model.model_validate(_with_all_tables(document.data, manager))
    except ValidationError as error:
        problems += schema_problems(document, (), model, "key", error)
        problems += _unloaded(document, model, manager)
    entries: dict[str, list[ResolvedEntry]] = {kind: [] for kind in kinds}
    wrappers: list[ResolvedEntry] = []
    for kind, location, entry in _entries(document, kinds.values()):
        try:
            plugin = _plugin(document, manager, kind, location, entry)
        except RegistryError as error:
            problems += error.problems
        else:
            to = wrappers if "wrap" in location else entries[kind.name]
            to.append(ResolvedEntry(location, plugin))
    ingestion = document.data.get("ingestion")
    if spec is not None and ingestion and spec.training.workers:
        wrong = two_readers(ingestion["use"], spec.training.workers)
        problems.append(document.problem(("training", "workers"), wrong))
    if problems or spec is None:
        raise RegistryError(sorted(problems, key=lambda problem: problem.line))
    return Resolved(kinds, spec, entries, wrappers)


def is_chooser(manager: PluginManager, name: str) -> bool:
    """Whether the sharding of that name chooses others.

    Raises:
        PluginError: what has such names cannot be used.
    """
    found = manager.find("sharding", name)
    return found is not None and issubclass(found.cls, Chooser)


def _with_all_tables(data: dict[str, Any], manager: PluginManager) -> dict[str, Any]:
    """The document with tables for choosers: all, which they leave to others that name them.

    So that one is not asked for tables which is not installed, it has them too.
    """

    def written(entry: Any) -> Any:
        name = entry.get("use") if isinstance(entry, dict) else None
        if not isinstance(name, str) or "tables" in entry:
            return entry
        try:
            has_all = manager.find("sharding", name) is None or is_chooser(manager, name)
        except PluginError:  # which is told with the line of the entry
            has_all = True
        return {"tables": ["*"], **entry} if has_all else entry

    entries = data.get("sharding")
    return {**data, "sharding": list(map(written, entries))} if isinstance(entries, list) else data


def two_readers(ingestion: str, workers: int) -> str:
    """What is wrong where the registry names an ingestion and workers too."""
    return (
        f"{workers} workers would read what ingestion {ingestion} brings; "
        "leave workers out (its readers are set by its options), or leave out the section ingestion"
    )


def _unloaded(
    document: Document, model: type[RegistrySpec], manager: PluginManager
) -> Iterator[Problem]:
    """Where a section is unknown: the packages that may have its kind and could not be loaded."""
    unknown = [name for name in document.data if name not in model.model_fields]
    if unknown and (broken := manager.broken):
        reasons = "; ".join(each.reason for each in broken)
        yield document.problem((unknown[0],), f"may be of what could not be loaded: {reasons}")


def _entries(
    document: Document, kinds: Iterable[Kind]
) -> Iterator[tuple[Kind, Location, dict[str, Any]]]:
    """Every entry that names a plugin, whatever else is wrong with it."""
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
        registered = _found(manager, kind, location, name)
    except PluginError as error:  # of its package
        raise RegistryError([document.problem((*location, "use"), str(error))]) from error
    if registered is None:
        message = _unknown_plugin(manager, kind, location, name)
        raise RegistryError([document.problem((*location, "use"), message)])
    options = entry.get("options", {})
    if not isinstance(options, dict):
        options = {}  # the schema has told of it already
    cls = registered.cls
    inside = (*location, "options")
    at = document.problem(location, "")
    stands_at = (at.path, at.line, at.field)
    unmade = Plugin(PluginOptions()).placed(stands_at)
    unmade.name = name  # type: ignore[misc]  # what a note calls it
    try:
        with plugin_call(unmade, "making it", cls), redirect_stdout(sys.stderr):
            made = cls(cls.Options.model_validate(options))
    except ValidationError as error:
        raise RegistryError(
            schema_problems(document, inside, cls.Options, f"option of {name}", error)
        ) from error
    except (RecdError, ValueError) as error:
        raise RegistryError([document.problem(inside, str(error))]) from error
    return made.placed(stands_at)


def _found(manager: PluginManager, kind: Kind, location: Location, name: str) -> Registered | None:
    """The plugin of that name that may stand at ``location``: of datasets, wrappers or others."""
    found = manager.find(kind.name, name)
    return found if found is not None and _belongs(found, location) else None


def _belongs(found: Registered, location: Location) -> bool:
    return issubclass(found.cls, DatasetWrapper) == ("wrap" in location)


def _unknown_plugin(manager: PluginManager, kind: Kind, location: Location, name: str) -> str:
    what = "wrapper" if "wrap" in location else f"{kind.name} plugin"
    of_kind = manager.plugins.get(kind.name, {})
    if name in of_kind:
        if what == "wrapper":
            return f"{name} is a dataset and wraps none; it belongs under dataset.use"
        return f"{name} wraps a dataset and is none itself; it belongs under dataset.wrap"
    kinds = manager.kinds
    for other, plugins in manager.plugins.items():
        if other != kind.name and name in plugins:
            return f"{name} is a {other} plugin; it belongs under {kinds[other].section}:"
    usable = [each for each, found in of_kind.items() if _belongs(found, location)]
    message = f"no {what} is named {name}"
    if suggestion := did_you_mean(name, usable):
        return message + suggestion
    package = name.partition(".")[0]
    installed = sorted({item.partition(".")[0] for of in manager.plugins.values() for item in of})
    if package in installed:
        return f"{message}; {what}s: {', '.join(sorted(usable)) or 'none'}"
    message = (
        f"{message}, and no plugin has a name that starts with {package}. (there are: "
        f"{', '.join(installed) or 'none'}); install the distribution that has it "
        "(recd-plugins brings all built-in ones), or give the folder of its file with --plugins-dir"
    )
    if manager.broken:
        reasons = "; ".join(broken.reason for broken in manager.broken)
        message += f". It may be in what could not be loaded: {reasons}"
    return message


def schema_problems(
    document: Document,
    base: Location,
    model: type[BaseModel],
    what: str,
    error: ValidationError,
) -> list[Problem]:
    """What pydantic found wrong, in the words of this project and with lines.

    Args:
        document: what was validated.
        base: where in it the validated part stands.
        model: the model of that part.
        what: what its keys are, in words, as ``key`` or ``option of acme.hash``.
        error: pydantic's.
    """
    data: Any = document.data
    for part in base:
        data = data.get(part, {}) if isinstance(data, dict) else data[part]
    found: dict[tuple[Location, str], Problem] = {}
    meant: set[Location] = set()  # keys that are there, misspelt
    for details in error.errors(include_url=False):
        if (
            details["type"] == "too_short"
            and len(details["input"]) > details["ctx"]["actual_length"]
        ):
            continue  # short only of the items that are wrong, which have problems of their own
        inside = _inside(data, details)
        location = (*base, *inside)
        problem = document.problem(location, in_words(details, inside, model, what))
        found[(location, details["type"])] = problem
        if details["type"] == "extra_forbidden":
            meant.add((*location[:-1], closest(str(inside[-1]), _known_keys(model, inside[:-1]))))
    return [
        problem
        for (location, kind), problem in found.items()
        if kind != "missing" or location not in meant
    ]


def _inside(data: Any, details: ErrorDetails) -> Location:
    """The part of pydantic's location that is in the file: it also names members of unions."""
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


def in_words(details: ErrorDetails, inside: Location, model: type[BaseModel], what: str) -> str:
    """One thing that pydantic found wrong, at ``inside`` of ``model``; see ``schema_problems``."""
    kind = details["type"]
    if kind == "missing":
        return f"is missing; this {what} is required"
    if kind == "extra_forbidden":
        known, word = _known_keys(model, inside[:-1]), str(inside[-1])
        if word.partition(" ")[0] in known:
            return f"unknown {what}; is a colon missing after {word.partition(' ')[0]}?"
        listed = f"; known: {', '.join(known)}" if known else "; none is known here"
        return f"unknown {what}{did_you_mean(word, known) or listed}"
    if kind == "value_error":
        return details["msg"].removeprefix("Value error, ")
    message = details["msg"][:1].lower() + details["msg"][1:]
    got = details["input"]
    if kind in ("dict_type", "model_type"):
        message = "input should be a mapping"
    if kind in ("list_type", "tuple_type"):
        message = "expected a list"
        if isinstance(got, str | int | float):
            return f"{message}, as in [{str(got)[:200]}]"
    suggestion = ""
    if kind == "literal_error" and isinstance(got, str):
        expected = str(details.get("ctx", {}).get("expected", ""))
        suggestion = did_you_mean(got, expected.replace("'", "").replace(" or ", ", ").split(", "))
    if got is None:
        field = _fields(model, inside[:-1]).get(str(inside[-1])) if inside else None
        may_be_empty = field is not None and not field.is_required()
        empty = {"expected a list": "[]", "input should be a mapping": "{}"}.get(message)
        suggestion = f"; leave it out, or write {empty}" if empty and may_be_empty else ""
        return f"{message}, got nothing{suggestion}"
    return f"{message}, got {short_repr(got)}{suggestion}"


def _known_keys(model: type[BaseModel] | None, location: Location) -> list[str]:
    return list(_fields(model, location))


def _fields(model: type[BaseModel] | None, location: Location) -> Mapping[str, FieldInfo]:
    """The fields of the model that stands at ``location`` inside ``model``."""
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return {} if model is None else model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in ``list[Model]``, ``dict[str, Model]``, ``Model | None`` and so on."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)

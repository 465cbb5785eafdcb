"""Checks a registry document against its schema and the plugins that are there."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from recd_plugins.errors import Problem, RecdError, RegistryError
from recd_plugins.interfaces import DatasetWrapper, Plugin, PluginOptions
from recd_plugins.manager import KINDS, PluginManager, Registered
from recd_plugins.plugin_call import PLUGIN_FAILURES, plugin_failure
from recd_plugins.registry.loader import Document, Location, short_repr
from recd_plugins.registry.schema import RegistrySpec
from recd_plugins.registry.written import misread


@dataclass(frozen=True)
class Resolved:
    """One entry of a document, enabled or not, with the plugin it names.

    The wrappers of a dataset are of the kind ``dataset``.
    """

    kind: str
    location: Location
    plugin: Plugin


def resolve(document: Document, manager: PluginManager) -> tuple[RegistrySpec, list[Resolved]]:
    """Validate everything, then make the plugin of every entry.

    Raises:
        RegistryError: everything that is wrong, in the order of lines.
    """
    problems: list[Problem] = []
    spec = None
    try:
        spec = RegistrySpec.model_validate(document.data)
    except ValidationError as error:
        problems += schema_problems(document, (), RegistrySpec, "key", error)
    else:
        problems += _misread(document, (), document.data, spec)
    resolved: list[Resolved] = []
    for kind, location, entry in _entries(document):
        try:
            plugin = _plugin(document, manager, kind, location, entry)
        except RegistryError as error:
            problems += error.problems
        else:
            resolved.append(Resolved(kind, location, plugin))
    if spec is not None and spec.ingestion is not None and spec.training.workers:
        problems.append(document.problem(("training", "workers"), two_readers(spec)))
    if problems or spec is None:
        raise RegistryError(sorted(problems, key=lambda problem: problem.line))
    return spec, resolved


def two_readers(spec: RegistrySpec) -> str:
    """What is wrong where the registry names an ingestion and workers too."""
    assert spec.ingestion is not None, "the caller looked"
    return (
        f"{spec.training.workers} workers would read what ingestion {spec.ingestion.use} brings; "
        "leave workers out (its readers are set by its options), or leave out the section ingestion"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean known?"``, or nothing where nothing is close."""
    meant = _meant(word, known)
    return f"; did you mean {meant}?" if meant else ""


def _meant(word: str, known: Iterable[str]) -> str:
    """The one of ``known`` that is there with a value behind it or is close; else nothing."""
    known = list(known)
    if (first := word.partition(" ")[0]) in known:
        return first
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.63)), "")


def shortened(names: list[str]) -> str:
    """At most eight of ``names``, and how many more there are."""
    more = len(names) - 8
    return ", ".join(names[:8]) + (f" and {more} more" if more > 0 else "")


def _entries(document: Document) -> Iterator[tuple[str, Location, dict[str, Any]]]:
    """Every entry that names a plugin, whatever else is wrong with it."""
    for kind in KINDS:
        section = document.data.get(kind)
        numbered = enumerate(section) if isinstance(section, list) else [(None, section)]
        for index, entry in numbered:
            if isinstance(entry, dict) and isinstance(entry.get("use"), str):
                yield kind, (kind,) if index is None else (kind, index), entry
    dataset = document.data.get("dataset")
    wrappers = dataset.get("wrap") if isinstance(dataset, dict) else None
    for index, entry in enumerate(wrappers if isinstance(wrappers, list) else []):
        if isinstance(entry, dict) and isinstance(entry.get("use"), str):
            yield "dataset", ("dataset", "wrap", index), entry


def _plugin(
    document: Document,
    manager: PluginManager,
    kind: str,
    location: Location,
    entry: dict[str, Any],
) -> Plugin:
    name = entry["use"]
    registered = _found(manager, kind, location, name)
    if registered is None:
        message = _unknown_plugin(manager, kind, location, name)
        raise RegistryError([document.problem((*location, "use"), message)])
    options = entry.get("options", {})
    if not isinstance(options, dict):
        options = {}  # the schema has told of it already
    cls = registered.cls
    inside = (*location, "options")
    try:
        validated: PluginOptions = cls.Options.model_validate(options)
    except ValidationError as error:
        raise RegistryError(
            schema_problems(document, inside, cls.Options, f"option of {name}", error)
        ) from error
    except PLUGIN_FAILURES as error:
        raise plugin_failure(cls, "checking its options", error) from error
    if problems := _misread(document, inside, options, validated):
        raise RegistryError(problems)
    try:
        return cls(validated)
    except (RecdError, ValueError) as error:
        raise RegistryError([document.problem(inside, str(error))]) from error
    except PLUGIN_FAILURES as error:
        raise plugin_failure(cls, "making it", error) from error


def _misread(document: Document, base: Location, raw: Any, value: Any) -> list[Problem]:
    return [document.problem(location, wrong) for location, wrong in misread(raw, value, base)]


def _found(manager: PluginManager, kind: str, location: Location, name: str) -> Registered | None:
    """The plugin of that name that may stand at ``location``: of datasets, wrappers or others."""
    found = manager.find(kind, name)
    if kind == "dataset" and found is not None and _wraps(found) != ("wrap" in location):
        return None
    return found


def _wraps(found: Registered) -> bool:
    return issubclass(found.cls, DatasetWrapper)


def _unknown_plugin(manager: PluginManager, kind: str, location: Location, name: str) -> str:
    what = "wrapper" if "wrap" in location else f"{kind} plugin"
    if name in manager.plugins[kind]:
        if what == "wrapper":
            return f"{name} is a dataset and wraps none; it belongs under dataset.use"
        return f"{name} wraps a dataset and is none itself; it belongs under dataset.wrap"
    for other in KINDS:
        if other != kind and name in manager.plugins[other]:
            return f"{name} is a {other} plugin; it belongs under {other}:"
    usable = [
        each
        for each, found in manager.plugins[kind].items()
        if kind != "dataset" or _wraps(found) == ("wrap" in location)
    ]
    message = f"no {what} is named {name}"
    if suggestion := did_you_mean(name, usable):
        return message + suggestion
    package = name.partition(".")[0]
    installed = sorted({item.partition(".")[0] for kind in KINDS for item in manager.plugins[kind]})
    if package in installed:
        return f"{message}; {what}s: {', '.join(sorted(usable)) or 'none'}"
    message = (
        f"{message}, and no plugin has a name that starts with {package}. (there are: "
        f"{', '.join(installed) or 'none'}); install the distribution that has it, or give the "
        f"folder of its file with --plugins-dir"
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
        what: what its keys are, in words, as ``key`` or ``option of recd.ikjt``.
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
        problem = document.problem(location, _message(details, inside, model, what))
        found[(location, details["type"])] = problem
        if details["type"] == "extra_forbidden":
            meant.add((*location[:-1], _meant(str(inside[-1]), _known_keys(model, inside[:-1]))))
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


def _message(details: ErrorDetails, inside: Location, model: type[BaseModel], what: str) -> str:
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
    return f"{message}, got {'nothing' if got is None else short_repr(got)}{suggestion}"


def _known_keys(model: type[BaseModel] | None, location: Location) -> list[str]:
    """The fields of the model that stands at ``location`` inside ``model``."""
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return [] if model is None else list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in ``list[Model]``, ``dict[str, Model]``, ``Model | None`` and so on."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)

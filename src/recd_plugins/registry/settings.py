"""Values of a registry document that a command line sets: ``training.learning_rate=0.05``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from recd_plugins.errors import Problem, RegistryError
from recd_plugins.registry.loader import Document, Location, read_value, render

_NAME = r"[^\s.\[\]='\"]+"
_KEY = re.compile(rf"{_NAME}(\[\d+\])*(\.{_NAME}(\[\d+\])*)*")


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """The document with ``settings``, each ``KEY=VALUE``, in place of what it says.

    KEY is as messages name it, ``sharding[0].options.tiers``; keys that the document lacks are
    added, items of lists are not. VALUE is YAML without mappings. What is wrong
    with it later names the setting in place of a line.

    Raises:
        RegistryError: everything that is wrong with the settings themselves.
    """
    data = deepcopy(document.data)
    given: dict[Location, str] = {}
    problems: list[Problem] = []
    for setting in settings:
        key, equals, text = str(setting).partition("=")  # a caller may have no types
        location = _location(key)
        if not equals or location is None:
            wrong = (
                "is no setting; write KEY=VALUE, as training.learning_rate=0.05, and settings "
                "behind what else the command takes"
            )
        elif inner := [key for key in given if key[: len(location)] == location]:
            is_same = inner[0] == location
            wrong = (
                f"{'is set twice, first by' if is_same else 'drops'} {given[inner[0]]}; keep one"
            )
        else:
            try:
                value = read_value(text, setting, location)
            except RegistryError as error:
                problems += error.problems
                continue
            given[location] = setting
            wrong = _set(data, location, value)
        if wrong:
            problems.append(Problem(str(setting), 0, "", wrong))
    if problems:
        raise RegistryError(problems)
    # What stood below a setting is gone, and with it the lines that told of it.
    lines = {at: line for at, line in document.lines.items() if not _is_below(at, given)}
    return replace(document, data=data, lines=lines, given=given)


def _is_below(location: Location, given: Collection[Location]) -> bool:
    return any(location[:depth] in given for depth in range(1, len(location)))


def _location(key: str) -> Location | None:
    if not _KEY.fullmatch(key):
        return None
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
    return tuple(int(index) if index else name for index, name in parts)


def _has_mapping(value: Any) -> bool:
    items = value if isinstance(value, list) else []
    return isinstance(value, dict) or any(map(_has_mapping, items))


def _set(data: Any, location: Location, value: Any) -> str:
    """Put ``value`` there; else what is wrong, and nothing is changed."""
    if _has_mapping(value):
        return "holds a mapping; set its values one by one, as KEY.NAME=VALUE"
    for depth, part in enumerate(location):
        where = render(location[:depth])
        if isinstance(part, int):
            if not isinstance(data, list):
                return f"{where} is no list in the file; leave out [{part}]"
            if part >= len(data):
                return f"{where} has {len(data)} in the file; [0] is the first"
        elif not isinstance(data, dict):
            what = f"a list; name an item, as {where}[0]" if isinstance(data, list) else "one value"
            return f"{where} is {what}"
        if depth == len(location) - 1:
            data[part] = value
        else:
            if isinstance(part, str) and data.get(part) is None:
                data[part] = {}
            data = data[part]
    return ""

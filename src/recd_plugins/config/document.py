"""Parsed YAML files with line numbers, and ``KEY=VALUE`` overrides of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from recd_plugins.runtime.errors import Problem, RegistryError

Location = tuple[str | int, ...]

_STANDARD = "tag:yaml.org,2002:"
_TAGS = {
    _STANDARD + kind
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")
}

# Suffixes of data files, to detect one that is passed instead of a registry file.
_TABLES = (
    *(".parquet", ".pq", ".parq", ".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json"),
    *(".arrow", ".arrows", ".feather", ".ipc", ".duckdb", ".ddb", ".lance"),
)
_COMPRESSED = (".gz", ".zst", ".bz2")

_NAME = r"[^\s.\[\]='\"]+"
_KEY = re.compile(rf"{_NAME}(\[\d+\])*(\.{_NAME}(\[\d+\])*)*")


@dataclass(frozen=True)
class Document:
    """Parsed YAML mapping, with the line number and ``KEY=VALUE`` override of each location."""

    path: str
    data: dict[str, Any]
    lines: dict[Location, int]
    given: dict[Location, str] = field(default_factory=dict)
    text: str = field(default="", repr=False)

    def problem(self, location: Location, message: str) -> Problem:
        """Create a ``Problem``, one error of the file.

        Its line is that of the value at ``location``, or of the nearest parent in the file.
        """
        inner = location
        while inner and inner not in self.lines and inner not in self.given:
            inner = inner[:-1]
        if inner in self.given:
            return Problem(
                self.given[inner], 0, render(location) if location != inner else "", message
            )
        return Problem(self.path, self.lines.get(inner, 0), render(location), message)


def render(location: Location) -> str:
    """Format a tuple of keys and list indices, such as ``sharding[0].options.tiers``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def names_table(name: str) -> bool:
    """Return whether a name is a URL or has the suffix of a data file, such as ``.csv``."""
    plain = name.lower().rstrip("/")
    for suffix in _COMPRESSED:
        plain = plain.removesuffix(suffix)
    return "://" in name or plain.endswith(_TABLES)


def read_yaml(
    path: Path,
    *,
    first: str = "`version: 1`, `dataset:` and `converter:`",
    text: str | None = None,
) -> Document:
    """Parse a YAML file that contains a mapping. YAML tags are errors, since tags can run code.

    ``first`` are usual first keys of the file, for messages. ``text`` replaces the file's content.

    Raises:
        RegistryError: the file cannot be read, is not YAML, is too large, or has tags or duplicate
            keys.
    """
    name = str(path)
    if names_table(name):
        raise _error(
            name,
            0,
            "this is a data file, not a registry file. Create a registry file with "
            f"recd init {name} my.yaml",
        )
    try:
        if text is None:
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"the file is not UTF-8 ({error.reason}). Save the file as UTF-8"
        raise _error(name, 0, message) from error
    except OSError as error:
        message = f"the file cannot be read: {error.strerror}. Check the path"
        raise _error(name, 0, message) from error
    reading = _Reading(name)
    root = reading.compose(text)
    if root is None:
        raise _error(name, 0, f"the file is empty. Start the file with {first}")
    if not isinstance(root, MappingNode):
        message = f"the file is not a mapping of sections. Start the file with {first}"
        raise _error(name, root.start_mark.line + 1, message)
    return Document(name, reading.read(root, ()), reading.lines, text=text)


def _error(path: str, line: int, message: str) -> RegistryError:
    return RegistryError([Problem(path, line, "", message)])


@dataclass
class _Reading:
    """Converts YAML nodes to Python values, and collects line numbers and errors."""

    path: str
    yaml: YAML = field(default_factory=lambda: YAML(typ="safe", pure=True))
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def compose(self, text: str) -> Node | None:
        try:
            root: Node | None = self.yaml.compose(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = f"the text is not valid YAML: {error.problem or error.context}"
            raise _error(self.path, mark.line + 1 if mark else 0, message) from error
        except (YAMLError, RecursionError, ValueError) as error:
            message = f"the text is not valid YAML: {' '.join(str(error).split())}"
            raise _error(self.path, 0, message) from error
        return root

    def read(self, root: Node, location: Location) -> Any:
        value = self._value(root, location)
        if self.problems:
            raise RegistryError(self.problems)
        return value

    def _value(self, node: Node, location: Location) -> Any:
        tag = str(node.tag)
        if tag not in _TAGS:
            message = f"YAML tag {tag!r} is not allowed. Write a plain value without a tag"
            self._refuse(node, location, message)
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, location)
        if isinstance(node, SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*location, index)] = item.start_mark.line + 1
                items.append(self._value(item, (*location, index)))
            return items
        try:
            return self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError, OverflowError):
            kind = tag.removeprefix(_STANDARD)
            self._refuse(node, location, f"{short_repr(node.value)} is not a YAML {kind}. Fix it")
            return None

    def _mapping(self, node: MappingNode, location: Location) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, ScalarNode) or key.tag != f"{_STANDARD}str":
                message = "this key is not a string. Write the key in quotes"
                if key.value == "<<":
                    message = "merge key << is not allowed. Write out the merged keys"
                self._refuse(key, location, message)
                continue
            inner = (*location, key.value)
            if key.value in result:
                first = self.lines[inner]
                message = f"the key is a duplicate of line {first}. Remove one of the two lines"
                self._refuse(key, inner, message)
                continue
            self.lines[inner] = key.start_mark.line + 1
            result[key.value] = self._value(item, inner)
        return result

    def _refuse(self, node: Node, location: Location, message: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append(Problem(self.path, line, render(location), message))


def short_repr(value: object) -> str:
    """Return ``repr(value)``, truncated to 200 characters, with the full length appended."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """Return a copy of the document with values overridden by ``KEY=VALUE`` arguments.

    KEY is a path such as ``sharding[0].options.tiers``, and VALUE is parsed as YAML. Missing keys
    are added, but missing list items are errors. Later error messages about an overridden value
    name the ``KEY=VALUE`` argument instead of a line.

    Raises:
        RegistryError: an argument is invalid.
    """
    data = deepcopy(document.data)
    given: dict[Location, str] = {}
    problems: list[Problem] = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not _KEY.fullmatch(key):
            wrong = "this argument is not KEY=VALUE. Write for example training.learning_rate=0.05"
        else:
            parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
            location = tuple(int(index) if index else name for index, name in parts)
            reading = _Reading(setting)
            try:
                root = reading.compose(text)
                value = None if root is None else reading.read(root, location)
            except RegistryError as error:
                problems += [replace(problem, line=0) for problem in error.problems]
                continue
            given[location] = setting
            wrong = _set(data, location, value)
        if wrong:
            problems.append(Problem(setting, 0, "", wrong))
    if problems:
        raise RegistryError(problems)
    # A setting replaces all values below its location.
    lines = {
        at: line
        for at, line in document.lines.items()
        if not any(at[:depth] in given for depth in range(1, len(at)))
    }
    return replace(document, data=data, lines=lines, given=given)


def _set(data: Any, location: Location, value: Any) -> str:
    """Set ``data`` at ``location`` to ``value``. Return an error message, empty on success."""
    for depth, part in enumerate(location):
        where = render(location[:depth])
        if isinstance(part, int):
            if not isinstance(data, list):
                return f"{where} is not a list in the file. Remove [{part}]"
            if part >= len(data):
                return f"{where} has {len(data)} items in the file. Use an item number below that"
        elif not isinstance(data, dict):
            if isinstance(data, list):
                return f"{where} is a list in the file. Add an item number, for example {where}[0]"
            return f"{where} is a single value in the file, without keys. Remove .{part}"
        if depth == len(location) - 1:
            data[part] = value
        else:
            if isinstance(part, str) and data.get(part) is None:
                data[part] = {}
            data = data[part]
    return ""

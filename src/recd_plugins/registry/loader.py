"""Reads a YAML file as plain data that remembers the line of everything in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from recd_plugins.errors import Problem, RegistryError

Location = tuple[str | int, ...]

_STANDARD = "tag:yaml.org,2002:"
_TAGS = {
    _STANDARD + kind
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")
}


@dataclass(frozen=True)
class Document:
    """A YAML mapping as dicts, lists and scalars, with the 1-based line of every key and item."""

    path: str
    data: dict[str, Any]
    lines: dict[Location, int]

    def problem(self, location: Location, message: str) -> Problem:
        """``message`` about ``location`` or, where that is not in the file, what encloses it."""
        inner = location
        while inner and inner not in self.lines:
            inner = inner[:-1]
        return Problem(self.path, self.lines.get(inner, 0), render(location), message)


def render(location: Location) -> str:
    """A location as users write it: ``sharding[0].options.tiers``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def read_yaml(path: Path) -> Document:
    """Parse a file whose top level is a mapping. Tags are refused: data only, never code.

    Raises:
        RegistryError: the file cannot be read, is no YAML, has a key twice or holds a tag.
    """
    name = str(path)
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(name, 0, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _error(name, line, f"is not UTF-8: byte 0x{error.object[error.start]:02x}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context
        raise _error(name, mark.line + 1 if mark else 0, f"is not YAML: {message}") from error
    except RecursionError as error:
        raise _error(name, 0, "is nested too deeply") from error
    except YAMLError as error:
        raise _error(name, 0, f"is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise _error(name, 0, "is empty; start with `version: 1`, `dataset:` and `converter:`")
    if not isinstance(root, MappingNode):
        raise _error(name, root.start_mark.line + 1, "must be a mapping of sections, as `version:`")
    reading = _Reading(name, yaml)
    data = reading.value(root, (), ())
    if reading.problems:
        raise RegistryError(reading.problems)
    return Document(name, data, reading.lines)


def _error(path: str, line: int, message: str) -> RegistryError:
    return RegistryError([Problem(path, line, "", message)])


@dataclass
class _Reading:
    """Turns YAML nodes into data, collecting lines and problems."""

    path: str
    yaml: YAML
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def value(self, node: Node, location: Location, enclosing: tuple[Node, ...]) -> Any:
        if node in enclosing:
            self._refuse(node, location, "contains itself through an alias")
            return None
        tag = str(node.tag)
        if tag not in _TAGS:
            self._refuse(node, location, f"tag {tag} is not allowed; write plain values")
            return None
        enclosing = (*enclosing, node)
        if isinstance(node, MappingNode):
            return self._mapping(node, location, enclosing)
        if isinstance(node, SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*location, index)] = item.start_mark.line + 1
                items.append(self.value(item, (*location, index), enclosing))
            return items
        assert isinstance(node, ScalarNode), "YAML has three kinds of nodes"
        try:
            return self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError):
            self._refuse(node, location, f"{node.value!r} is no {tag.removeprefix(_STANDARD)}")
            return None

    def _mapping(
        self, node: MappingNode, location: Location, enclosing: tuple[Node, ...]
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or key.tag != f"{_STANDARD}str":
                what = "merge key <<" if key.value == "<<" else "key that is no text"
                self._refuse(key, location, f"{what} is not allowed; write plain keys")
                continue
            inner = (*location, key.value)
            if key.value in result:
                first = self.lines[inner]
                self._refuse(key, inner, f"stands here twice, first in line {first}; keep one")
                continue
            self.lines[inner] = line
            result[key.value] = self.value(item, inner, enclosing)
        return result

    def _refuse(self, node: Node, location: Location, message: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append(Problem(self.path, line, render(location), message))

"""Reads a YAML file as plain data that remembers the line of everything in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from recd_plugins.errors import Problem, RegistryError
from recd_plugins.registry.bounds import (
    DEEPEST,
    MOST_VALUES,
    TOO_DEEP,
    TOO_MANY,
    BoundedComposer,
    TooMuchError,
    read_small_file,
)

Location = tuple[str | int, ...]

_STANDARD = "tag:yaml.org,2002:"
_TAGS = {
    _STANDARD + kind
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")
}

# What names of tables end with, which people hand over in place of a registry file; text may be
# compressed.
_TABLES = (
    *(".parquet", ".pq", ".parq", ".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json"),
    *(".arrow", ".arrows", ".feather", ".ipc", ".duckdb", ".ddb", ".lance"),
)
_COMPRESSED = (".gz", ".zst", ".bz2")

_LONGEST_KEY = 255
# Of a message, which may quote what is wrong.
_LONGEST_MESSAGE = 1500


@dataclass(frozen=True)
class Document:
    """A YAML mapping as dicts, lists and scalars, with the 1-based line of every key and item.

    ``given`` has what was said elsewhere than in the file, as it was written there; ``text`` is the
    file.
    """

    path: str
    data: dict[str, Any]
    lines: dict[Location, int]
    given: dict[Location, str] = field(default_factory=dict)
    text: str = field(default="", repr=False)

    def problem(self, location: Location, message: str) -> Problem:
        """``message`` about ``location`` or, where that is not in the file, what encloses it."""
        inner = location
        while inner and inner not in self.lines and inner not in self.given:
            inner = inner[:-1]
        if inner in self.given:
            field = render(location) if location != inner else ""
            return Problem(self.given[inner], 0, field, _shortened(message))
        return Problem(self.path, self.lines.get(inner, 0), render(location), _shortened(message))


def render(location: Location) -> str:
    """A location as users write it: ``sharding[0].options.tiers``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def names_table(name: str) -> bool:
    """Whether a name is that of a table, which `recd init` makes a registry of, or a URL."""
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
    """Parse a file whose top level is a mapping. Tags are refused: data only, never code.

    Args:
        path: of the file.
        first: what such a file starts with, in words.
        text: what it held when it was read before, in place of what it holds now.

    Raises:
        RegistryError: the file cannot be read, is no YAML, holds more than ``bounds`` allow, has a
            key twice, a tag, or a value that means different things to different readers.
    """
    name = str(path)
    if names_table(name):
        raise _error(name, 0, f"is a table, no registry file; recd init {name} my.yaml writes one")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = BoundedComposer
    try:
        if text is None:
            text = read_small_file(path).decode("utf-8")
        root = yaml.compose(text)
    except IsADirectoryError as error:
        raise _error(name, 0, "is a folder, no registry file; name the file") from error
    except OSError as error:
        raise _error(name, 0, f"cannot be read: {error.strerror}") from error
    except TooMuchError as error:
        raise _error(name, error.problem_mark.line + 1, str(error.problem)) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _error(name, line, f"is not UTF-8: byte 0x{error.object[error.start]:02x}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context
        raise _error(name, mark.line + 1 if mark else 0, f"is not YAML: {message}") from error
    except YAMLError as error:
        raise _error(name, 0, f"is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise _error(name, 0, str(error)) from error
    if root is None:
        raise _error(name, 0, f"is empty; start with {first}")
    if not isinstance(root, MappingNode):
        raise _error(name, root.start_mark.line + 1, f"must be a mapping, as {first}")
    reading = _Reading(name, yaml)
    data = reading.value(root, (), ())
    if reading.problems:
        raise RegistryError(reading.problems)
    return Document(name, data, reading.lines, text=text)


def read_value(text: str, name: str, location: Location) -> Any:
    """A value as a line of a file would have it, under the rules of ``read_yaml``.

    Args:
        text: YAML.
        name: of where it stands, for messages.
        location: where it belongs.

    Raises:
        RegistryError: as ``read_yaml``.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = BoundedComposer
    try:
        root = yaml.compose(text)
    except TooMuchError as error:
        raise _error(name, 0, str(error.problem)) from error
    except YAMLError as error:
        raise _error(name, 0, f"is not YAML: {getattr(error, 'problem', error)}") from error
    if root is None:
        return None
    reading = _Reading(name, yaml)
    value = reading.value(root, location, ())
    if reading.problems:
        raise RegistryError([replace(problem, line=0) for problem in reading.problems])
    return value


def _error(path: str, line: int, message: str) -> RegistryError:
    return RegistryError([Problem(path, line, "", message)])


@dataclass
class _Reading:
    """Turns YAML nodes into data, collecting lines and problems."""

    path: str
    yaml: YAML
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_values: int = 0

    def value(self, node: Node, location: Location, enclosing: tuple[Node, ...]) -> Any:
        if node in enclosing:
            self._refuse(node, location, "contains itself through an alias")
            return None
        # Aliases repeat what stands elsewhere: a few lines may hold billions of values.
        self.num_values += 1
        if self.num_values > MOST_VALUES or len(location) > DEEPEST:
            problem = TOO_MANY if self.num_values > MOST_VALUES else TOO_DEEP
            raise _error(self.path, self.lines.get(location, 0), f"{problem}, through aliases")
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
            value = self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError, OverflowError):
            kind = tag.removeprefix(_STANDARD)
            self._refuse(node, location, f"{short_repr(node.value)} is no {kind}")
            return None
        wrong = _wrong_with(value, node)
        if wrong is not None:
            self._refuse(node, location, wrong)
            return None
        return value

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
            wrong = _wrong_with(key.value, key)
            if len(key.value) > _LONGEST_KEY:
                wrong = f"has {len(key.value):,} characters; {_LONGEST_KEY} is the most"
            if wrong is not None:
                self._refuse(key, location, f"key {short_repr(key.value)} {wrong}")
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


def short_repr(value: object) -> str:
    """``repr``, of which at most the start and its length are shown."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"


def _shortened(message: str) -> str:
    more = len(message) - _LONGEST_MESSAGE
    return message if more <= 0 else f"{message[:_LONGEST_MESSAGE]}... ({more:,} more)"


def _wrong_with(value: object, node: ScalarNode) -> str | None:
    """Why a scalar is refused wherever it stands; None where it is not."""
    if isinstance(value, str):
        if "\0" in value:
            return "holds a NUL character, which no name and no path has"
        if any("\ud800" <= character <= "\udfff" for character in value):
            return "holds half of a UTF-16 pair, which is no character; write the character itself"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return f"{short_repr(node.value)} has more than 64 bits"
    digits = node.value.lstrip("+-") if type(value) is int else ""
    if len(digits) > 1 and digits[0] == "0" and digits.replace("_", "").isdecimal():
        return f"{node.value} is octal to some readers and decimal to others; leave out the 0"
    if (
        type(value) is float
        and value in (float("inf"), float("-inf"))
        and "inf" not in node.value.lower()
    ):
        return f"{short_repr(node.value)} is beyond the largest number of 64 bits, 1.8e308"
    return None

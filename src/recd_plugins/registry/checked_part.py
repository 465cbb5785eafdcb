"""Table parts as the framework asks them: what they raise or return wrongly names their plugin."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from rich.protocol import is_renderable

from recd_plugins.errors import PluginError, Problem, RecdError
from recd_plugins.interfaces import Choice, Plugin, RowMemory, Section, TablePart
from recd_plugins.interfaces.lookup_kernels import LookupKernels
from recd_plugins.plugin_call import PLUGIN_FAILURES, plugin_failure
from recd_plugins.registry.entries import Entry, at_entry
from recd_plugins.values.channels import KINDS, is_group
from recd_plugins.values.work import Work

T = TypeVar("T")

# Pairs of a table's work, say: an iterator of more has no end.
_MOST = 1_000_000


class CheckedPart(TablePart):
    """A part that does what the part of an entry does, each method in a call that is checked.

    Of tables that the entry does not claim it is not asked: nothing is done to them.

    Args:
        path: of the registry file.
        entry: whose part it is.
        part: that its plugin made.
    """

    def __init__(self, path: Path, entry: Entry[Plugin], part: TablePart) -> None:
        self.path, self.entry, self.part = path, entry, part
        self._claimed: dict[str, bool] = {}

    def __str__(self) -> str:
        return f"{self.entry.plugin.name} ({self.entry.field}, line {self.entry.line})"

    @property
    def place(self) -> str:
        """The plugin and where its entry stands, for errors that are of several entries."""
        return f"{self.entry.plugin.name} ({self.path}:{self.entry.line} {self.entry.field})"

    def claims(self, table: str) -> bool:
        """Whether the entry's tables have this one among them."""
        if table not in self._claimed:
            self._claimed[table] = self.entry.matches(table)
        return self._claimed[table]

    def asked(self, method: str, *arguments: Any, of: TablePart | Section | None = None) -> Any:
        """What a method of the part, or of a section of it, returns.

        Raises:
            PluginError: it raised something, or returned what it must not; names the entry's line,
                the plugin and the method.
            RegistryError: it raised a RecdError; names the entry's line.
        """
        asked = self.part if of is None else of
        what = method if of is None else f"{method} of section {of.name}"  # type: ignore[union-attr]
        expected, is_right = _EXPECTED[method]
        try:
            result = getattr(asked, method)(*arguments)
            if isinstance(result, Iterator):
                result = tuple(islice(result, _MOST + 1))
        except RecdError:
            with at_entry(self.path, self.entry):
                raise
        except PLUGIN_FAILURES as error:
            failure = plugin_failure(type(self.entry.plugin), what, error, type(asked))
            raise self.error(str(failure)) from error
        if isinstance(result, tuple) and len(result) > _MOST:
            raise self.error(f"{self.entry.plugin.name}: {what} returned more than {_MOST:,}")
        why = ""
        try:
            right = is_right(result)
        except _WrongNumberError as error:
            raise self.error(f"{self.entry.plugin.name}: {what} returned {error}") from error
        except PLUGIN_FAILURES as error:  # as of what cannot be iterated over, or pickled
            right, why = False, f" ({type(error).__name__}: {error})"
        if not right:
            raise self.error(
                f"{self.entry.plugin.name}: {what} returned {result!r:.200}; expected "
                f"{expected}{why}"
            )
        return result

    def error(self, message: str) -> PluginError:
        """The error for what the part does wrong, with the entry's line."""
        entry = self.entry
        return PluginError(str(Problem(str(self.path), entry.line, entry.field, message)))


class _WrongNumberError(Exception):
    """Work that cannot be, in words."""


def by_class(parts: Iterable[CheckedPart]) -> dict[type[TablePart], list[CheckedPart]]:
    """Parts that work together, in the order of the file."""
    found: dict[type[TablePart], list[CheckedPart]] = {}
    for part in parts:
        found.setdefault(type(part.part), []).append(part)
    return found


def asked_together(parts: Sequence[CheckedPart], method: str, *arguments: Any) -> Any:
    """What the class of ``parts`` answers for all of them: ``CheckedPart.asked``."""
    return parts[0].asked(method, [each.part for each in parts], *arguments)


def one_answer(
    parts: Iterable[TablePart], table: str, what: str, ask: Callable[[TablePart], T | None]
) -> T | None:
    """What one of the parts says of a table; None where none does.

    Args:
        parts: that are asked.
        table: its name, for the error.
        what: they are asked, for the error.
        ask: asks one of them.

    Raises:
        PluginError: two have an answer; names their entries.
    """
    said = [(part, answer) for part in parts if (answer := ask(part)) is not None]
    if len(said) > 1:
        raise PluginError(
            f"table {table}: {said[0][0]} and {said[1][0]} both say its {what}, which has one "
            "value; leave the table to one of them, or let one return None"
        )
    return said[0][1] if said else None


# True is an int to Python, and no number that a plugin means.
def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def _is_share(value: Any) -> bool:
    return _is_number(value) and value <= 1


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and _is_number(value)


def _is_ranks(value: object) -> bool:
    return value is None or (
        isinstance(value, Collection) and len(value) > 0 and all(map(_is_whole, value))
    )


def _is_groups(value: Any) -> bool:
    return all(
        not isinstance(group, str) and all(isinstance(table, str) for table in group)
        for group in value
    )


def _is_row_memory(value: object) -> bool:
    return value is None or (isinstance(value, RowMemory) and all(map(_is_whole, value)))


def _is_work(value: Any) -> bool:
    for ranks, work in value:
        if not (isinstance(ranks, slice) and isinstance(work, Work)):
            return False
        for name, number in vars(work).items():
            if type(number) is bool or not 0 <= number < math.inf:
                raise _WrongNumberError(
                    f"Work.{name} of {number}; expected a finite number from 0 on"
                )
    return True


def _is_lines(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_channels(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        kind in KINDS and is_group(group) and isinstance(name, str)
        for (group, kind), name in value.items()
    )


def _mapping(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Of strings to what is right."""
    return lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(key, str) and right(each) for key, each in value.items())
    )


def _is_json(value: object) -> bool:
    return bool(json.dumps(value))


def _of(wanted: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, wanted)


#: What each method returns, in words, and whether something is that.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    # Of which each is looked at next to those of the plugin.
    "constraints": ("torchrec's ParameterConstraints by table name", _of(Mapping)),
    "ranks": ("numbers of ranks, at least one, or None", _is_ranks),
    "together": ("groups of names of tables", _is_groups),
    "kernels": (
        "LookupKernels or None",
        lambda value: value is None or isinstance(value, LookupKernels),
    ),
    "needs_stock_kernels": ("reasons in words by table name", _mapping(_of(str))),
    "sharded_share": ("a share from 0 to 1", _is_share),
    "row_memory": ("a RowMemory of bytes or None", _is_row_memory),
    "fetch_bandwidth": (
        "bytes a second, more than 0, or None",
        lambda value: value is None or (_is_number(value) and value > 0),
    ),
    "memory_of_rank": ("bytes by what they are", _mapping(_is_whole)),
    "activation_bytes": ("bytes, from 0 on", _is_number),
    "work": ("pairs of a slice of ranks and Work", _is_work),
    "collectives": ("how many, from 0 on", _is_whole),
    "figures": ("JSON values by name", _mapping(_is_json)),
    "words": (
        "a sequence of lines",
        lambda value: _is_lines(value) and all(isinstance(line, str) for line in value),
    ),
    "channels": (
        "names by process group's name and kind of collective, which is one of " + ", ".join(KINDS),
        _is_channels,
    ),
    # It travels to the other ranks.
    "observe": ("what pickle takes", lambda value: bool(pickle.dumps(value))),
    "sections": (
        "a sequence of Sections with a name each",
        lambda value: (
            _is_lines(value)
            and all(
                isinstance(each, Section) and isinstance(getattr(each, "name", None), str)
                for each in value
            )
        ),
    ),
    "as_json": ("JSON values", _is_json),
    "shown": (
        "a sequence of lines and rich's renderables",
        lambda value: _is_lines(value) and all(map(is_renderable, value)),
    ),
    "with_compute": ("a Choice", lambda value: isinstance(value, Choice)),
    "__str__": ("a line", lambda value: isinstance(value, str)),
}


# What is done to tables of others.
_NOTHING = TablePart()
# Methods whose first argument is a table, a sharding option of one, or its name.
_OF_A_TABLE = {
    *("ranks", "sharded_share", "row_memory", "fetch_bandwidth"),
    *("activation_bytes", "work", "figures", "words"),
}


def _asks(method: str) -> Callable[..., Any]:
    def of_table(part: CheckedPart, table: Any, *others: Any) -> Any:
        if part.claims(table if isinstance(table, str) else table.name):
            return part.asked(method, table, *others)
        return getattr(_NOTHING, method)(table, *others)

    def of_all(part: CheckedPart, *arguments: Any) -> Any:
        return part.asked(method, *arguments)

    return of_table if method in _OF_A_TABLE else of_all


# Every method of a part is asked in one way; those of the class by ``together``.
for _method, _function in vars(TablePart).items():
    if not _method.startswith("_") and not isinstance(_function, classmethod):
        setattr(CheckedPart, _method, _asks(_method))

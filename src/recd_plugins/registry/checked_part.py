"""Table parts with the entries of the registry that they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Plugin, TableStrategy
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry.entries import Entry, at_entry

T = TypeVar("T")


class CheckedPart(TableStrategy):
    """The part of an entry. Errors name the entry; tables of other entries are left alone.

    Args:
        path: of the registry file.
        entry: whose part it is.
        part: that its plugin made.
    """

    def __init__(self, path: Path, entry: Entry[Plugin], part: TableStrategy) -> None:
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

    def call_plugin(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part; an iterator comes back as a tuple.

        Raises:
            RegistryError: it raised a RecdError; names the entry's line.
        """
        with (
            at_entry(self.path, self.entry),
            plugin_call(self.entry.plugin, method, type(self.part)),
        ):
            result = getattr(self.part, method)(*arguments)
            return tuple(result) if isinstance(result, Iterator) else result


def by_class(parts: Iterable[CheckedPart]) -> dict[type[TableStrategy], list[CheckedPart]]:
    """Parts that work together, in the order of the file."""
    found: dict[type[TableStrategy], list[CheckedPart]] = {}
    for part in parts:
        found.setdefault(type(part.part), []).append(part)
    return found


def call_class(parts: Sequence[CheckedPart], method: str, *arguments: Any) -> Any:
    """Call a class method for all ``parts`` of the class."""
    return parts[0].call_plugin(method, [each.part for each in parts], *arguments)


def one_answer(
    parts: Iterable[TableStrategy], table: str, what: str, ask: Callable[[TableStrategy], T | None]
) -> T | None:
    """The answer of the one part that has one for a table; None where none has.

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


# Methods whose first argument is a table, a sharding option of one, or its name.
_OF_A_TABLE = {
    *("ranks", "sharded_share", "row_memory", "fetch_bandwidth"),
    *("activation_bytes", "work", "figures", "words"),
}


def _delegate(method: str) -> Callable[..., Any]:
    def of_table(part: CheckedPart, table: Any, *others: Any) -> Any:
        if part.claims(table if isinstance(table, str) else table.name):
            return part.call_plugin(method, table, *others)
        return getattr(TableStrategy(), method)(table, *others)

    def of_all(part: CheckedPart, *arguments: Any) -> Any:
        return part.call_plugin(method, *arguments)

    return of_table if method in _OF_A_TABLE else of_all


for _method, _function in vars(TableStrategy).items():
    if not _method.startswith("_") and not isinstance(_function, classmethod):
        setattr(CheckedPart, _method, _delegate(_method))

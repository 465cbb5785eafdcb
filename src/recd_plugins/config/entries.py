"""Plugin entries of ``registry.yaml``, and the features or tables that each entry matches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from recd_plugins.interfaces import Chooser, Kind, Plugin, TableStrategy
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.runtime.text import did_you_mean, shortened

P = TypeVar("P", bound=Plugin, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[P]):
    """Plugin entry in a list section of ``registry.yaml``, such as ``sharding``.

    Attributes:
        plugin: the plugin with its options.
        patterns: names or glob patterns of features or tables.
        field: location of the entry in the file, such as ``sharding[0]``.
        line: 1-based line of the entry.
    """

    plugin: P
    patterns: tuple[str, ...]
    field: str
    line: int

    @property
    def yields(self) -> bool:
        """Return whether glob patterns match only the names that no other entry matches."""
        return isinstance(self.plugin, Chooser)

    def matches(self, name: str) -> bool:
        """Return whether a pattern matches ``name``."""
        return name in self._names or any(fnmatchcase(name, pattern) for pattern in self._globs)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(pattern for pattern in self.patterns if not is_glob(pattern))

    @cached_property
    def _globs(self) -> tuple[str, ...]:
        return tuple(filter(is_glob, self.patterns))


@contextmanager
def at_entry(path: Path, entry: Entry[Plugin]) -> Iterator[None]:
    """Convert RecdErrors, except PluginErrors, to RegistryErrors with the entry's line."""
    try:
        yield
    except (PluginError, RegistryError):
        raise
    except RecdError as error:
        raise RegistryError([Problem(str(path), entry.line, entry.field, str(error))]) from error


def claim(path: Path, kind: Kind, entries: tuple[Entry[Plugin], ...], names: Iterable[str]) -> Any:
    """Return a dict from name to the entries that match the name, as ``RunConfig.claim`` does."""
    names = dict.fromkeys(names)
    what = kind.claimed
    if what is None:
        raise TypeError(f"entries of kind {kind.name!r} have no feature or table patterns")
    problems = [
        Problem(
            str(path),
            entry.line,
            f"{entry.field}.{what}s",
            f"{pattern!r} matches no {what}"
            + (
                did_you_mean(pattern, names)
                or f". Use one of these {what}s: {shortened(list(names))}"
                if names
                else f": the model has none for {kind.section!r}. Remove this entry"
            ),
        )
        for entry in entries
        for pattern in entry.patterns
        if not matched(pattern, names)
    ]
    claims = {
        name: tuple(e for e in claimants if not e.yields or name in e.patterns) or claimants
        for name in names
        if (claimants := tuple(entry for entry in entries if entry.matches(name)))
    }
    several = kind.claims.startswith("several")
    if not several:
        problems += _conflicts(path, claims, what)
    if problems:
        raise RegistryError(problems)
    return claims if several else {name: claimants[0] for name, claimants in claims.items()}


def _conflicts(
    path: Path, claims: dict[str, tuple[Entry[Plugin], ...]], what: str
) -> list[Problem]:
    together: dict[tuple[Entry[Plugin], ...], list[str]] = {}
    for name, claimants in claims.items():
        if len(claimants) > 1:
            together.setdefault(claimants, []).append(name)
    return [
        Problem(
            str(path),
            claimants[-1].line,
            claimants[-1].field,
            f"several entries match the {what}s {shortened(claimed)}: "
            + " and ".join(f"{entry.field} (line {entry.line})" for entry in claimants)
            + f". Narrow the {what}s: patterns until one entry matches, or set enabled: false in "
            "the other entries",
        )
        for claimants, claimed in together.items()
    ]


def is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def matched(pattern: str, names: Collection[str]) -> list[str]:
    """Return the elements of ``names`` that match a name or glob pattern, in order."""
    if not is_glob(pattern):
        return [pattern] if pattern in names else []
    return [name for name in names if fnmatchcase(name, pattern)]


class PluginStrategy(TableStrategy):
    """Limits a plugin's TableStrategy to matching tables, and adds the entry to errors."""

    def __init__(self, path: Path, entry: Entry[Plugin], part: TableStrategy) -> None:
        self.path, self.entry, self.part = path, entry, part
        self._claimed: dict[str, bool] = {}

    def claims(self, table: str) -> bool:
        """Return whether a pattern of the entry matches a table name."""
        if table not in self._claimed:
            self._claimed[table] = self.entry.matches(table)
        return self._claimed[table]

    def call_plugin(self, method: str, *arguments: Any) -> Any:
        """Call the wrapped strategy's method named ``method``. Convert an iterator to a tuple."""
        with (
            at_entry(self.path, self.entry),
            plugin_call(self.entry.plugin, method, type(self.part)),
        ):
            result = getattr(self.part, method)(*arguments)
            return tuple(result) if isinstance(result, Iterator) else result


def by_class(parts: Iterable[PluginStrategy]) -> dict[type[TableStrategy], list[PluginStrategy]]:
    """Group wrapped strategies by class, in the order of ``parts``."""
    found: dict[type[TableStrategy], list[PluginStrategy]] = {}
    for part in parts:
        found.setdefault(type(part.part), []).append(part)
    return found


def call_class(parts: Sequence[PluginStrategy], method: str, *arguments: Any) -> Any:
    """Call a class method of the strategies' common class with all wrapped strategies."""
    return parts[0].call_plugin(method, [each.part for each in parts], *arguments)


# Methods whose first argument is a table name, or an object with the table's name.
_OF_A_TABLE = {
    *("sharded_share", "row_memory", "fetch_bandwidth"),
    *("activation_bytes", "work", "figures", "describe"),
}


def _delegate(method: str) -> Callable[..., Any]:
    def of_table(part: PluginStrategy, table: Any, *others: Any) -> Any:
        if part.claims(table if isinstance(table, str) else table.name):
            return part.call_plugin(method, table, *others)
        return getattr(TableStrategy(), method)(table, *others)

    def of_all(part: PluginStrategy, *arguments: Any) -> Any:
        return part.call_plugin(method, *arguments)

    return of_table if method in _OF_A_TABLE else of_all


for _method, _function in vars(TableStrategy).items():
    if not _method.startswith("_") and not isinstance(_function, classmethod):
        setattr(PluginStrategy, _method, _delegate(_method))

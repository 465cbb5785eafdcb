"""Entries of the list sections, and which of them is for which feature or table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from recd_plugins.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.interfaces import Chooser, Kind, Plugin
from recd_plugins.words import did_you_mean, shortened

P = TypeVar("P", bound=Plugin, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[P]):
    """An entry of a list section.

    Attributes:
        plugin: the plugin, made with the entry's options.
        patterns: names or globs of features or tables.
        field: where it stands in the file, as ``sharding[0]``.
        line: 1-based line in the file.
    """

    plugin: P
    patterns: tuple[str, ...]
    field: str
    line: int

    @property
    def yields(self) -> bool:
        """Whether others have what they name too, but for names that it spells out itself."""
        return isinstance(self.plugin, Chooser)

    def matches(self, name: str) -> bool:
        """Whether a pattern matches ``name``; case counts."""
        return name in self._names or any(fnmatchcase(name, pattern) for pattern in self._globs)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(pattern for pattern in self.patterns if not is_glob(pattern))

    @cached_property
    def _globs(self) -> tuple[str, ...]:
        return tuple(filter(is_glob, self.patterns))


@contextmanager
def at_entry(path: Path, entry: Entry[Plugin]) -> Iterator[None]:
    """A context in which a plugin works for its entry: what it refuses names the entry's line.

    Raises:
        RegistryError: a RecdError was raised; a PluginError, which names the plugin, stays one.
    """
    try:
        yield
    except (PluginError, RegistryError):
        raise
    except RecdError as error:
        raise RegistryError([Problem(str(path), entry.line, entry.field, str(error))]) from error


def claim(path: Path, kind: Kind, entries: tuple[Entry[Plugin], ...], names: Iterable[str]) -> Any:
    """Which of ``entries``, of one kind, is for which of ``names``: ``RunConfig.claim``."""
    names = dict.fromkeys(names)
    what = kind.claimed
    if what is None:
        raise TypeError(f"entries of kind {kind.name} claim {kind.claims}, no features or tables")
    problems = [
        Problem(
            str(path),
            entry.line,
            f"{entry.field}.{what}s",
            f"{pattern} matches no {what}"
            + (did_you_mean(pattern, names) or f"; the {what}s: {shortened(list(names))}"),
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
            f"{what} {shortened(claimed)} is claimed by "
            + " and ".join(f"{entry.field} (line {entry.line})" for entry in claimants)
            + f"; narrow the patterns of one, or give it enabled: false: a {what} has one "
            f"{claimants[-1].plugin.kind} entry",
        )
        for claimants, claimed in together.items()
    ]


def is_glob(pattern: str) -> bool:
    """Return whether a pattern may match other names than itself."""
    return any(character in pattern for character in "*?[")


def matched(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that match a pattern, in their order; case counts.

    In a set or dict of ``names`` a pattern that is a name is looked up: a file may list thousands.
    """
    if not is_glob(pattern):
        return [pattern] if pattern in names else []
    return [name for name in names if fnmatchcase(name, pattern)]

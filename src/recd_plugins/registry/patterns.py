"""Patterns that entries of a registry name features and tables by."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase


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

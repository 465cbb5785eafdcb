"""The lines of a registry file that say what ``auto`` chose."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from glob import escape

from recd_plugins.api import Candidate


def patterns_of(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Patterns that match ``names`` and none of ``others``, few and in their order.

    A pattern is the shortest beginning of a name, up to a ``_``, that no other name has.
    """
    found: list[str] = []
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in found):
            found.append(_pattern(name, names, others))
    return found


def _pattern(name: str, names: Sequence[str], others: Collection[str]) -> str:
    for end, letter in enumerate(name[:-1], start=1):
        beginning = name[:end]
        if letter != "_" or any(other.startswith(beginning) for other in others):
            continue
        if sum(each.startswith(beginning) for each in names) > 1:
            return f"{escape(beginning)}*"
    return escape(name)


def entry_line(offer: Candidate, patterns: Sequence[str]) -> str:
    """An item of the section ``sharding``."""
    options = f", options: {offer.written}" if offer.options else ""
    tables = json.dumps(list(patterns), ensure_ascii=False)  # YAML has no pairs for an emoji
    return f"  - {{use: {offer.use}, tables: {tables}{options}}}"

"""Words of messages: the name that was meant, and long lists in short."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Of fewer letters no name is told.
_BEGINNING = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean known?"``, or nothing where nothing is close."""
    meant = closest(word, known)
    return f"; did you mean {meant}?" if meant else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The one of ``known`` that has a value or an end behind it or is close; else nothing."""
    known = list(known)
    if (first := word.partition(" ")[0]) in known:
        return first
    begun = [name for name in known if name.lower().startswith(word.lower())]
    if len(word) >= _BEGINNING and len(begun) == 1:
        return begun[0]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.63)), "")


def shortened(names: Sequence[str]) -> str:
    """The first of ``names``, eight at most, and how many more there are."""
    more = len(names) - 8
    return ", ".join(names[:8]) + (f" and {more} more" if more > 0 else "")

"""Formats texts for messages: suggestions, short lists, and numbers of bytes."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence

# Shorter words are not completed to a name.
_BEGINNING = 3
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``". Did you mean 'NAME'?"``, or an empty string if no known name is similar."""
    known = list(known)
    begun = [name for name in known if name.lower().startswith(word.lower())]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.63)
    if len(word) >= _BEGINNING and len(begun) == 1:
        close = begun
    return f". Did you mean {close[0]!r}?" if close else ""


def shortened(names: Sequence[str], form: Callable[[str], str] = repr) -> str:
    """Return the first eight names, separated by commas, and the number of remaining names.

    ``form`` formats one name, with quotes by default.
    """
    more = len(names) - 8
    return ", ".join(map(form, names[:8])) + (f" and {more} more" if more > 0 else "")


def metric_words(name: str) -> str:
    """Return the name of a metric as shown in texts, such as ``test AUC`` for ``test_auc``."""
    return (
        name.replace("num_samples", "samples")
        .replace("_", " ")
        .replace(".", " ")
        .replace("auc", "AUC")
        .replace("gAUC", "GAUC")
    )


def read_bytes(words: str | int) -> int:
    """Parse a number of bytes, such as 256MB or 2GiB. Raises ValueError if it is not positive."""
    match = _FORM.fullmatch(str(words).strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    amount = float(match[1]) * unit if match and unit else 0.0
    num_bytes = round(amount) if math.isfinite(amount) else 0
    if not num_bytes:
        raise ValueError(
            f"{words!r} is not a positive number of bytes. Write, for example, 256MB, 2GiB or "
            "1000000."
        )
    return num_bytes


def size_text(num_bytes: float) -> str:
    """Format a number of bytes with a unit that is a power of 1024, such as ``3.1 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def bytes_text(value: float | None) -> str:
    """Format bytes with a unit that is a power of 1000, such as ``3.1 KB``. Returns - for None."""
    if value is None:
        return "-"
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"

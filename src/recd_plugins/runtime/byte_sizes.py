"""Bytes in words."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def read_bytes(words: str | int) -> int:
    """Bytes of a number with a unit, as 256MB or 2GiB; without a unit they are bytes.

    Raises:
        ValueError: these are no bytes, or none at all; says which forms there are.
    """
    match = _FORM.fullmatch(str(words).strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    amount = float(match[1]) * unit if match and unit else 0.0
    num_bytes = round(amount) if math.isfinite(amount) else 0
    if not num_bytes:
        raise ValueError(f"{words!r} is no number of bytes; write 256MB, 2GiB or a whole number")
    return num_bytes


def bytes_text(value: float | None) -> str:
    """Bytes in a unit that suits them, in powers of 1000."""
    if value is None:
        return "-"
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"

"""Figures as tables show them."""

from __future__ import annotations


def bytes_text(value: float | None) -> str:
    """Bytes in a unit that suits them, in powers of 1000."""
    if value is None:
        return "-"
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"

"""The option ``budget``: memory in words."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def read_budget(budget: Any) -> dict[str, float]:
    """A budget as the cost model takes it: ``memory_ratio`` or ``memory_bytes``.

    Args:
        budget: a string or a whole number of bytes; any other value is no budget.

    Raises:
        ValueError: says which forms there are.
    """
    if budget == "memory_neutral":
        return {"memory_ratio": 1.0}
    written = isinstance(budget, str | int)
    if written and (match := _FORM.fullmatch(str(budget).strip())):
        number, unit = float(match[1]), match[2].lower()
        if number and unit == "x":
            return {"memory_ratio": number}
        if number and unit in _UNITS:
            return {"memory_bytes": number * _UNITS[unit]}
    raise ValueError(
        f"{budget!r} is no budget; write memory_neutral, a multiple of row-wise memory as 1.5x, or "
        "bytes as 2GiB"
    )

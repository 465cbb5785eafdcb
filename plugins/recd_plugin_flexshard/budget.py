"""The option ``budget``: memory in words."""

from __future__ import annotations

import re
from typing import Any

from recd_plugins.api.files import read_bytes

_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)\s*[xX]")


def read_budget(budget: Any) -> dict[str, float]:
    """A budget as the cost model takes it: ``memory_ratio`` or ``memory_bytes``.

    Args:
        budget: a string or a whole number of bytes; any other value is no budget.

    Raises:
        ValueError: says which forms there are.
    """
    if budget == "memory_neutral":
        return {"memory_ratio": 1.0}
    if isinstance(budget, str) and (multiple := _MULTIPLE.fullmatch(budget.strip())):
        if ratio := float(multiple[1]):
            return {"memory_ratio": ratio}
    elif isinstance(budget, str | int):
        try:
            return {"memory_bytes": float(read_bytes(budget))}
        except ValueError:
            pass  # says what a budget may be, below
    raise ValueError(
        f"{budget!r} is no budget; write memory_neutral, a multiple of row-wise memory as 1.5x, or "
        "bytes as 2GiB"
    )

"""What was read of a file: requests and bytes, counted where they are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Request", "num_bytes", "of_columns"]


@dataclass(frozen=True)
class Request:
    """Bytes ``start`` to ``stop`` of a file."""

    path: str
    start: int
    stop: int


def of_columns(requests: Sequence[Request], sizes: dict[str, int]) -> list[Request]:
    """The requests that read columns. One that reaches the end of its file is for the footer."""
    return [each for each in requests if each.stop < sizes[each.path]]


def num_bytes(requests: Sequence[Request]) -> int:
    """Bytes of all."""
    return sum(each.stop - each.start for each in requests)

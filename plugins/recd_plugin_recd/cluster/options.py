"""Options of ``recd cluster``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: Called with the rows read and the rows written since the last call.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ClusterOptions:
    """Options of ``recd cluster``.

    Attributes:
        session, timestamp: their columns; None takes what ``open_source`` takes.
        memory: bytes that the whole process may take.
        keep_share: share of the sessions that stay, more than 0, at most 1.
        seed: of the choice of these sessions.
        row_group_rows: most rows of a row group of the output.
    """

    source: Path
    target: Path
    session: str | None = None
    timestamp: str | None = None
    memory: int = 2_000_000_000
    layout: Literal["list", "list_dict"] = "list"
    row_group_rows: int = 8192
    nulls: Literal["error", "empty"] = "error"
    keep_share: float = 1.0
    seed: int = 0
    engine: Literal["embedded", "spark"] = "embedded"

"""What a clustering run is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Engine = Literal["embedded", "spark"]
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
    engine: Engine = "embedded"

    def identity(self) -> dict[str, Any]:
        """All of it as JSON values: a run goes on from another's work if these are the same."""
        return {**asdict(self), "source": str(self.source), "target": str(self.target)}

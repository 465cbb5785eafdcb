"""What a file of scores is called and has, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recd_plugins.api import RecdError

#: Columns of every file of scores: the 0-based row of the table, and the probability.
ROW, SCORE = "row", "score"
#: Formats by the suffix of a file.
FORMATS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl"}


def format_of(path: Path, named: str | None) -> str:
    """The format of a file, by its suffix where none is named.

    Raises:
        RecdError: the suffix names none.
    """
    if (found := named or FORMATS.get(path.suffix.lower())) is None:
        raise RecdError(
            f"{path}: its suffix names no format of {', '.join(FORMATS)}; name one with --format"
        )
    return found


def check_keep(keep: Sequence[str]) -> None:
    """Refuse columns that the file has anyway, or one that is named twice."""
    for name in keep:
        if name in (ROW, SCORE) or keep.count(name) > 1:
            raise RecdError(f"--keep {name}: the file of scores has one such column already")

"""Names of the columns that every score file of ``recd predict`` has."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import tasks

#: The 0-based row of the table, and the probability.
ROW, SCORE = "row", "score"


def score_names(of: Sequence[tasks.Task]) -> list[str]:
    """Return the names of the score columns: ``score``, or with tasks ``score_TASK`` for each."""
    return [f"{SCORE}_{task.name}" for task in of] or [SCORE]

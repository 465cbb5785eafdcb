"""Names of the columns that every score file of ``recd predict`` has."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Dataset, RecdError, tasks

#: The 0-based row of the table, and the probability.
ROW, SCORE = "row", "score"


def score_names(of: Sequence[tasks.Task]) -> list[str]:
    """Return the names of the score columns: ``score``, or with tasks ``score_TASK`` for each."""
    return [f"{SCORE}_{task.name}" for task in of] or [SCORE]


def known_tasks(dataset: Dataset) -> tuple[tasks.Task, ...]:
    """Return the tasks of a dataset; () if its columns are unknown without the data."""
    try:
        schema = dataset.known_schema()
    except RecdError:
        return ()
    return () if schema is None else schema.tasks

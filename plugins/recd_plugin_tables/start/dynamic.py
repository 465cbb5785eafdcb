"""Dynamic tables of ids with many values, for ``recd init --dynamic``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugin_tables.kinds import feature_name
from recd_plugin_tables.start.guesses import Guess, Guesses, Shared

if TYPE_CHECKING:
    from recd_plugin_tables.start.histories import StoredHistory

#: Id columns with more distinct values get a dynamic table. Others get a vocabulary.
MOST_CATEGORIES = 256
#: Default of option ``buckets`` of ``dynamic.table``.
_BUCKETS = 64
# Room for ids: a multiple of the ids seen, and of the standard deviation of ids in a bucket.
_ROOM, _DEVIATIONS = 1.5, 4
# Estimated ratio of all ids to the ids of the first rows of a table.
_UNSEEN = 2

COMMENT = """\
# Dynamic tables look up raw ids, which need no vocabulary. Training gives new ids rows and, in full
# buckets, evicts the least recently used ids. num_embeddings has room for 1.5 times the ids seen.
# Texts are hashed to 63-bit ids. The probability that any two of n texts share an id is at most
# n^2 / 2^64, which is 0.00000006 for a million texts.
"""


def dynamic_tables(
    guesses: Guesses, alike: Sequence[Shared], history: StoredHistory | None
) -> dict[str, int]:
    """Return a dict from each feature that needs a dynamic table to the rows of the table."""
    columns = [each for each in guesses.features("id", "ids") if _has_raw_ids(each)]
    distinct = {feature_name(each.name): each.seen.distinct for each in columns}
    for group in alike:
        distinct |= {
            name: group.distinct for name in map(feature_name, group.names) if name in distinct
        }
    if history is not None:
        distinct[history.name] = history.distinct
    unseen = 1 if guesses.survey.is_whole else _UNSEEN
    return {name: num_rows(unseen * ids) for name, ids in distinct.items() if ids > MOST_CATEGORIES}


def num_rows(ids: int) -> int:
    """Return the rows of a dynamic table for a number of ids: full buckets with one more row."""
    mean = ids / _BUCKETS
    return _BUCKETS * (math.ceil(max(_ROOM * mean, mean + _DEVIATIONS * math.sqrt(mean))) + 1)


def _has_raw_ids(column: Guess) -> bool:
    """Return whether a column has ids, none of them negative, that are no part of a time."""
    seen = column.seen
    fits = (seen.least or 0) >= 0 and (seen.largest or 0) < 2**63
    return fits and not column.options.get("by")

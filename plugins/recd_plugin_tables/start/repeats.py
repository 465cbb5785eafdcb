"""Whether storing equal rows once pays, by the sample of a table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from recd_plugin_tables.start.guesses import Guesses
from recd_plugins.api import least_ids_saved

# Rows that are looked at.
_ROWS = 20_000


def repeats_pay(guesses: Guesses, batch_size: int, copies: int) -> bool:
    """Return whether a feature saves enough ids in batches, in the order of the import.

    Args:
        guesses: what columns are taken for.
        batch_size: rows of a batch.
        copies: rows of a batch in place of one of the table, such as its negatives.
    """
    survey = guesses.survey
    candidates = max((each.rows for each in survey.seen if each.leaf.exploded), default=0)
    copies *= max(1, candidates // survey.rows)
    group = guesses.the("session") or guesses.the("request")
    order = None
    if group is not None and not group.seen.leaf.exploded:
        order = np.argsort(_codes(survey.values(group.name)), kind="stable")
    for each in guesses.features("ids"):
        needed = least_ids_saved(sequence=each.history)
        if each.seen.length < needed or each.seen.leaf.exploded:
            continue
        values = survey.values(each.name)
        values = values.take(pa.array(order[:_ROWS])) if order is not None else values[:_ROWS]
        stored = _share_stored(values, max(1, batch_size // copies)) / copies
        if each.seen.length * (1 - stored) >= needed:
            return True
    return False


def _share_stored(values: pa.Array, batch_size: int) -> float:
    """Return unique rows of batches, as a share of all rows."""
    rows = [tuple(each) if isinstance(each, list) else each for each in values.to_pylist()]
    starts = range(0, len(rows), batch_size)
    return sum(len(set(rows[start : start + batch_size])) for start in starts) / len(rows)


def _codes(values: pa.Array) -> np.ndarray:
    """Return numbers that are equal where values are."""
    codes = values.dictionary_encode(null_encoding="encode").indices
    return np.asarray(codes.to_numpy(zero_copy_only=False))

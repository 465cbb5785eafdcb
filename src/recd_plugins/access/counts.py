"""Counts of rows as a pair of arrays: distinct row ids, and how often each was read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Counts = NDArray[np.float64]


def count_ids(ids: Rows) -> tuple[Rows, Counts]:
    """The distinct ids, ascending, and how often each is there."""
    rows, counts = np.unique(ids, return_counts=True)
    return rows, counts.astype(np.float64)


def add_counts(rows: Sequence[Rows], counts: Sequence[Counts]) -> tuple[Rows, Counts]:
    """All rows of several pairs, ascending, and the sums of their counts."""
    every = np.concatenate(rows)
    # Stable is a merge sort, which is quick where the parts are sorted already.
    order = np.argsort(every, kind="stable")
    every = every[order]
    first = np.empty(len(every), bool)
    first[:1] = True
    np.not_equal(every[1:], every[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    if not len(starts):
        return every, np.empty(0, np.float64)
    return every[starts], np.add.reduceat(np.concatenate(counts)[order], starts)


def most_read_first(rows: Rows, counts: Counts) -> tuple[Rows, Counts]:
    """Distinct rows by falling count; of equal counts the smaller row is first."""
    if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
        order = np.argsort(rows)
        rows, counts = rows[order], counts[order]
    order = np.argsort(-counts, kind="stable")
    return rows[order], counts[order]


def keep_most_read(rows: Rows, counts: Counts, bound: int) -> tuple[Rows, Counts, float]:
    """The most read rows, at most ``bound``, with counts that are the third value too low at most.

    Misra-Gries' step: the count of the most read row that must go is taken off all counts, and
    rows that keep one stay. More than ``bound`` rows lose that much, so over any number of such
    steps the error is below ``total / (bound + 1)`` (Agarwal et al., Mergeable Summaries, PODS
    2012, section 2).
    """
    if len(rows) <= bound:
        return rows, counts, 0.0
    error = float(np.partition(counts, len(counts) - bound - 1)[len(counts) - bound - 1])
    keep = counts > error
    return rows[keep], counts[keep] - error, error

"""The largest batch of a rank for which there is a plan."""

from __future__ import annotations

from collections.abc import Callable

from recd_plugins.errors import NoPlanError

#: The least step between two batch sizes, in rows.
GRANULE = 64
# Batches are found to one part in so many.
_PARTS = 128
# FBGEMM counts the rows of a batch in 32 bits, so that training.batch_size is less.
_LIMIT = 2**31


def largest_batch(fits: Callable[[int], bool], *, start: int, together: int = 1) -> tuple[int, int]:
    """The largest batch that fits, and the step in which it was looked for.

    ``fits`` was true of the result, and false of the result and a step more.

    Args:
        fits: whether there is a plan at a batch size.
        start: a batch size to begin with.
        together: rows of which batches are multiples.

    Raises:
        NoPlanError: not even ``GRANULE`` rows fit, or as many times ``together``.
    """
    least = GRANULE * together
    low, high = 0, max(least, start - start % least)
    while high < _LIMIT and fits(high):
        low, high = high, 2 * high
    # A step divides low and high: they are the least times a number, or one doubled.
    while (high - low) > (step := granule(low, least)):
        middle = low + max(step, (high - low) // 2 // step * step)
        if middle < _LIMIT and fits(middle):
            low = middle
        else:
            high = middle
    if not low:
        raise NoPlanError(
            f"no plan fits, not even for batches of {least} rows a rank; use more ranks, or "
            "smaller tables"
        )
    return low, high - low


def granule(batch_size: int, least: int) -> int:
    """The step at a batch size: the least one doubled as long as it is a small part of it."""
    step = least
    while 2 * step * _PARTS <= batch_size:
        step *= 2
    return step

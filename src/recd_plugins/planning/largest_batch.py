"""The largest batch of a rank for which there is a plan."""

from __future__ import annotations

from collections.abc import Callable

from recd_plugins.errors import NoPlanError

#: Batches are searched in steps of so many rows.
GRANULE = 64
# No batch of a rank is larger: some 16 million rows.
_LIMIT = 2**24


def largest_batch(fits: Callable[[int], bool], *, start: int) -> int:
    """The largest multiple of ``GRANULE`` that fits, by doubling and bisection.

    ``fits`` was true of the result, and false of the next multiple.

    Args:
        fits: whether there is a plan at a batch size.
        start: a batch size to begin with.

    Raises:
        NoPlanError: not even ``GRANULE`` rows fit.
    """
    limit = _LIMIT // GRANULE
    low, high = 0, max(1, start // GRANULE)
    while high < limit and fits(high * GRANULE):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * GRANULE):
            low = middle
        else:
            high = middle
    if not low:
        raise NoPlanError(
            f"no plan fits, not even for batches of {GRANULE} rows a rank; use more ranks, or "
            "smaller tables"
        )
    return low * GRANULE

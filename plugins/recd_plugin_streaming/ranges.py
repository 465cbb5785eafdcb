"""Ranges of offsets, and the position of a rank in a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Half-open ranges of offsets, ascending. The end None stands for "no end".
Ranges = tuple[tuple[int, int | None], ...]


def runs(offsets: NDArray[np.int64]) -> Ranges:
    """Return the ranges of adjacent values in ascending ``offsets``, int64 ``[N]``."""
    if not len(offsets):
        return ()
    breaks = np.flatnonzero(np.diff(offsets) != 1)
    firsts = offsets[np.concatenate(([0], breaks + 1))].tolist()
    lasts = offsets[np.concatenate((breaks, [len(offsets) - 1]))].tolist()
    return tuple((first, last + 1) for first, last in zip(firsts, lasts, strict=True))


def contains(ranges: Ranges, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each offset is in one of the ranges, bool ``[N]``."""
    inside = np.zeros(len(offsets), np.bool_)
    for start, stop in ranges:
        inside |= (offsets >= start) & (offsets < (np.inf if stop is None else stop))
    return inside


def joined(ranges: Ranges) -> Ranges:
    """Return sorted ranges, with adjacent ranges joined and empty ranges removed."""
    found: list[tuple[int, int | None]] = []
    for start, stop in sorted(ranges, key=lambda each: each[0]):
        if stop is not None and stop <= start:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def cut(ranges: Ranges, start: int) -> Ranges:
    """Return the parts of ranges at or after offset ``start``."""
    return joined(tuple((max(first, start), stop) for first, stop in ranges))


def size(ranges: Ranges) -> int:
    """Return the number of offsets in finite ranges."""
    return sum(stop - start for start, stop in ranges if stop is not None)


class Left(NamedTuple):
    """The rows of one partition or file that are not yet trained.

    Attributes:
        window: untrained rows of a partly trained window. A resumed run trains them in the same
            order.
        after: all rows after this window.
    """

    window: Ranges
    after: Ranges

    @property
    def is_done(self) -> bool:
        return not self.window and not self.after

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Left:
        window, after = (tuple((start, stop) for start, stop in ranges) for ranges in values)
        return cls(window, after)


#: Position of one rank: the rows left of each partition or file that it has started.
Positions = Mapping[str, Left]

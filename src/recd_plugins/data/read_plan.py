"""Who reads which rows: row ranges are dealt to ranks, and a position can be taken up anywhere.

All rows of an epoch stand in one line, unit after unit. Each rank gets one range of the line, of
the same number of whole batches; what is left over at the end of the line nobody reads. So a rank
reads whole units but for the two at the ends of its range.

A position is the history of the epoch: pairs (world size, steps). Rows that were read are cut out
of the line, and for another number of ranks what is left is dealt anew. Nothing else needs to be
known to tell which rows were read, on any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np


@dataclass(frozen=True)
class Unit:
    """Adjacent rows that are read at once, such as a Parquet row group.

    Attributes:
        file: index of the file.
        group: index of the unit in its file.
        first_row: 0-based row in the file.
        num_rows: rows, at least 1.
    """

    file: int
    group: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Piece:
    """``num_rows`` rows of a unit from its row ``skip`` on."""

    unit: Unit
    skip: int
    num_rows: int


#: Ranges of the line, half open, in order.
Ranges = tuple[tuple[int, int], ...]
#: Pairs of world size and steps taken at it.
History = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReadPlan:
    """The rows of every epoch.

    Args:
        units: what there is to read, in order.
        batch_size: rows of a batch of one rank.
        shuffle: put the units in another order for each epoch.
        seed: of the shuffle.
    """

    units: tuple[Unit, ...]
    batch_size: int
    shuffle: bool = False
    seed: int = 0

    @cached_property
    def num_rows(self) -> int:
        return sum(unit.num_rows for unit in self.units)

    def num_steps(self, world_size: int, history: History = ()) -> int:
        """Batches that each of ``world_size`` ranks gets in an epoch after ``history``."""
        return _num_steps(self._remaining(history), world_size, self.batch_size)

    def is_possible(self, history: History) -> bool:
        """Whether an epoch has as many rows as the steps of ``history`` take."""
        remaining: Ranges = ((0, self.num_rows),)
        for world_size, steps in history:
            if not 0 <= steps <= _num_steps(remaining, world_size, self.batch_size):
                return False
            remaining = _after(remaining, world_size, self.batch_size, steps)
        return True

    def pieces(
        self, epoch: int, history: History, rank: int, world_size: int, steps: int
    ) -> Iterator[Piece]:
        """What this rank reads after ``history`` and ``steps`` more steps at ``world_size``."""
        shares = _deal(self._remaining(history), world_size, self.batch_size)
        mine = _cut(shares[rank], steps * self.batch_size, _size(shares[rank]))
        line = self._line(epoch)
        starts = [0, *accumulate(unit.num_rows for unit in line)]
        for start, stop in mine:
            index = int(np.searchsorted(starts, start, side="right")) - 1
            while start < stop:
                end = min(stop, starts[index + 1])
                yield Piece(line[index], start - starts[index], end - start)
                start = end
                index += 1

    def _line(self, epoch: int) -> Sequence[Unit]:
        if not self.shuffle:
            return self.units
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.units))
        return [self.units[index] for index in order]

    def _remaining(self, history: History) -> Ranges:
        remaining: Ranges = ((0, self.num_rows),)
        for world_size, steps in history:
            remaining = _after(remaining, world_size, self.batch_size, steps)
        return remaining


def cut_into_blocks(
    pieces: Iterable[Piece], batch_size: int, most_rows: int
) -> Iterator[tuple[Piece, ...]]:
    """The same rows in blocks of whole batches, for workers of which each reads some.

    A new block starts with the first batch that starts in another unit than the batch before it, so
    that of two blocks only what completes a batch is in one unit. Longer ranges of one unit are
    cut where a block has ``most_rows`` rows, or one batch.
    """
    most_rows = max(1, most_rows // batch_size) * batch_size
    block: list[Piece] = []
    rows = 0
    for piece in pieces:
        rest = piece
        while rest.num_rows:
            taken = min(rest.num_rows, -rows % batch_size or most_rows)
            block.append(replace(rest, num_rows=taken))
            rest = replace(rest, skip=rest.skip + taken, num_rows=rest.num_rows - taken)
            rows += taken
            if rows % batch_size == 0:
                yield tuple(block)
                block, rows = [], 0
    assert not block, "the plan deals whole batches"


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _num_steps(ranges: Ranges, world_size: int, batch_size: int) -> int:
    return _size(ranges) // (world_size * batch_size)


def _cut(ranges: Ranges, first: int, last: int) -> Ranges:
    """Rows ``first`` to ``last`` of those in ``ranges``."""
    ends = accumulate((stop - start for start, stop in ranges), initial=0)
    return tuple(
        (start + max(0, first - before), start + min(stop - start, last - before))
        for (start, stop), (before, after) in zip(ranges, pairwise(ends), strict=True)
        if max(before, first) < min(after, last)
    )


def _deal(ranges: Ranges, world_size: int, batch_size: int) -> list[Ranges]:
    """The share of every rank, and last the rest that nobody reads."""
    share = _num_steps(ranges, world_size, batch_size) * batch_size
    bounds = [*(rank * share for rank in range(world_size + 1)), _size(ranges)]
    return [_cut(ranges, first, last) for first, last in pairwise(bounds)]


def _after(ranges: Ranges, world_size: int, batch_size: int, steps: int) -> Ranges:
    """What is left when every rank has taken ``steps`` batches of its share."""
    *shares, rest = _deal(ranges, world_size, batch_size)
    left = [_cut(share, steps * batch_size, _size(share)) for share in shares]
    return tuple(piece for share in [*left, rest] for piece in share)

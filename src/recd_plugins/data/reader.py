"""Assignment of row ranges to ranks, which can resume with another number of ranks.

All rows of an epoch form one sequence. Each rank gets a range with the same number of full batches;
the remaining rows are not read. A position is the history of the epoch as pairs (world size,
steps). After a resume, the rows that were not read are assigned to the ranks again.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar

import numpy as np

from recd_plugins.data.rows import rebatch
from recd_plugins.interfaces import Reader, Rows
from recd_plugins.runtime.errors import DataError


@dataclass(frozen=True)
class Unit:
    """Smallest range of rows that a file format reads, such as a Parquet row group.

    ``group`` is the index of the unit in the file with the index ``file``. ``first_row`` is the
    0-based number of the unit's first row in this file.
    """

    file: int
    group: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Piece:
    """Range of ``num_rows`` rows of a unit (row group), starting at row ``skip`` of the unit."""

    unit: Unit
    skip: int
    num_rows: int


#: Half-open row ranges of the epoch's sequence, in order.
Ranges = tuple[tuple[int, int], ...]
#: Pairs (world size, steps taken with it).
History = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReadPlan:
    """Assigns the rows of ``units``, such as Parquet row groups, to ranks in every epoch.

    A batch has ``batch_size`` rows per rank. ``shuffle`` shuffles the units for each epoch.
    """

    units: tuple[Unit, ...]
    batch_size: int
    shuffle: bool = False
    seed: int = 0

    @cached_property
    def num_rows(self) -> int:
        return sum(unit.num_rows for unit in self.units)

    def num_steps(self, world_size: int, history: History = ()) -> int:
        """Return the batches left per rank. ``history`` has pairs (world size, batches read)."""
        return _num_steps(self._remaining(history), world_size, self.batch_size)

    def pieces(
        self, epoch: int, history: History, rank: int, world_size: int, steps: int
    ) -> Iterator[Piece]:
        """Yield the row ranges that a rank still reads in an epoch.

        ``history`` has a pair (world size, steps) for each earlier run that read a part of the
        epoch. ``steps`` is the number of batches that the current run has read per rank.
        """
        shares = _deal(self._remaining(history), world_size, self.batch_size)
        mine = _cut(shares[rank], steps * self.batch_size, _size(shares[rank]))
        line: Sequence[Unit] = self.units
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(line))
            line = [self.units[index] for index in order]
        starts = [0, *accumulate(unit.num_rows for unit in line)]
        for start, stop in mine:
            index = int(np.searchsorted(starts, start, side="right")) - 1
            while start < stop:
                end = min(stop, starts[index + 1])
                yield Piece(line[index], start - starts[index], end - start)
                start = end
                index += 1

    def _remaining(self, history: History) -> Ranges:
        remaining: Ranges = ((0, self.num_rows),)
        for world_size, steps in history:
            remaining = _after(remaining, world_size, self.batch_size, steps)
        return remaining


def cut_into_blocks(
    pieces: Iterable[Piece], batch_size: int, most_rows: int
) -> Iterator[tuple[Piece, ...]]:
    """Divide row ranges into blocks of full batches, the units of work of reader workers.

    A block contains at most ``most_rows`` rows of one unit, such as a Parquet row group, or a
    single larger batch.
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
    """Return rows ``first`` to ``last`` (exclusive), counted over all ``ranges``."""
    ends = accumulate((stop - start for start, stop in ranges), initial=0)
    return tuple(
        (start + max(0, first - before), start + min(stop - start, last - before))
        for (start, stop), (before, after) in zip(ranges, pairwise(ends), strict=True)
        if max(before, first) < min(after, last)
    )


def _deal(ranges: Ranges, world_size: int, batch_size: int) -> list[Ranges]:
    """Return the ranges of each rank, followed by the ranges that no rank reads."""
    share = _num_steps(ranges, world_size, batch_size) * batch_size
    bounds = [*(rank * share for rank in range(world_size + 1)), _size(ranges)]
    return [_cut(ranges, first, last) for first, last in pairwise(bounds)]


def _after(ranges: Ranges, world_size: int, batch_size: int, steps: int) -> Ranges:
    """Return the ranges that are unread after each rank has read ``steps`` batches."""
    *shares, rest = _deal(ranges, world_size, batch_size)
    left = [_cut(share, steps * batch_size, _size(share)) for share in shares]
    return tuple(piece for share in [*left, rest] for piece in share)


T = TypeVar("T")

#: Function that yields the rows of pieces in order, in batches of any size.
ReadPieces = Callable[[Iterator[Piece]], Generator[Rows, None, None]]

_STATE_VERSION = 1
# Maximum rows per block, since a worker holds a block in memory.
_MOST_ROWS = 16_384
_END = object()


class PlannedReader(Reader):
    """Reads the batches that a ``ReadPlan`` assigns to one rank.

    Args:
        plan: assignment of rows to ranks.
        read: function that reads row ranges, called in a thread unless ``ahead`` is 0.
        data: JSON values that identify the data. A loaded state must have the same values.
        what: description of data and split, for error messages.
        ahead: number of batches that a thread prefetches.

    Raises:
        DataError: there are too few rows for one batch on every rank.
    """

    def __init__(
        self,
        plan: ReadPlan,
        read: ReadPieces,
        *,
        data: Mapping[str, Any],
        what: str,
        rank: int,
        world_size: int,
        ahead: int,
    ) -> None:
        if plan.num_rows == 0:
            raise DataError(
                f"{what} has no rows. Check the dataset's files, row filters and splits"
            )
        if plan.num_steps(world_size) == 0:
            raise DataError(
                f"{what} has {plan.num_rows} rows, too few for a batch of {plan.batch_size} on "
                f"each of {world_size} ranks. Reduce training.batch_size or training.ranks"
            )
        self._plan = plan
        self._read = read
        self._what = what
        self._rank = rank
        self._world_size = world_size
        self._ahead = ahead
        self._data = {
            "rows": plan.num_rows,
            "batch_size": plan.batch_size,
            "shuffle": plan.seed if plan.shuffle else None,
            **data,
        }
        self._epoch = 0
        self._history: History = ()
        self._steps = 0
        self._cut_from: tuple[int, History, int] | None = None
        self._blocks: tuple[Sequence[tuple[Piece, ...]], Sequence[int]] = (), ()

    def __len__(self) -> int:
        return self._plan.num_steps(self._world_size)

    def __iter__(self) -> Iterator[Rows]:
        for block in self.blocks(0, 1):
            yield from block

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterator[Rows]]:
        """Yield the batches of every ``num_workers``-th block, from block ``worker`` on."""
        blocks, ends = self._cut()
        size = self._plan.batch_size
        mine = slice(worker, None, num_workers)
        with closing(prefetch(lambda: self._batches(blocks[mine]), self._ahead)) as batches:
            for block, end in zip(blocks[mine], ends[mine], strict=True):
                num_steps = sum(piece.num_rows for piece in block) // size
                yield self._block(batches, end - num_steps, num_steps)
            next(batches, None)  # files are checked again at their end
        self._epoch, self._history, self._steps = self._epoch + 1, (), 0

    def num_blocks(self) -> int:
        blocks, _ = self._cut()
        return len(blocks)

    def skip(self, num_batches: int) -> int:
        left = self.num_left()
        if num_batches > left:
            self._epoch, self._history, self._steps = self._epoch + 1, (), 0
            return left
        self._steps += num_batches
        return num_batches

    def num_left(self) -> int:
        return self._plan.num_steps(self._world_size, self._history) - self._steps

    def state_dict(self) -> dict[str, Any]:
        history = [list(entry) for entry in self._history]
        if self._steps:
            history.append([self._world_size, self._steps])
        return {
            "version": _STATE_VERSION,
            "data": dict(self._data),
            "epoch": self._epoch,
            "history": history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise DataError(
                f"the reader state of {self._what} has version {state.get('version')!r}, expected "
                f"{_STATE_VERSION}. Resume with the version of recd-plugins that wrote the state"
            )
        if "data" not in state:
            raise DataError(
                f"the checkpoint was written with a dataset wrapper around {self._what}. Restore "
                "the previous dataset.wrap: section, or start a new run"
            )
        for name, mine in self._data.items():
            if (theirs := state["data"].get(name)) != mine:
                raise DataError(
                    f"the checkpoint belongs to other data than {self._what}: {name!r} was "
                    f"{theirs!r} and is now {mine!r}. Restore the previous data and options, or "
                    "start a new run"
                )
        history = tuple((world_size, steps) for world_size, steps in state["history"])
        self._epoch, self._steps = state["epoch"], 0
        if history and history[-1][0] == self._world_size:
            *history_before, (_, self._steps) = history
            history = tuple(history_before)
        self._history = history

    def _cut(self) -> tuple[Sequence[tuple[Piece, ...]], Sequence[int]]:
        """Return the remaining blocks of the epoch, and the step at the end of each block."""
        position = self._epoch, self._history, self._steps
        if self._cut_from != position:
            pieces = self._plan.pieces(
                self._epoch, self._history, self._rank, self._world_size, self._steps
            )
            size = self._plan.batch_size
            blocks = list(cut_into_blocks(pieces, size, _MOST_ROWS))
            steps = (sum(piece.num_rows for piece in block) // size for block in blocks)
            _, *ends = accumulate(steps, initial=self._steps)
            self._cut_from, self._blocks = position, (blocks, ends)
        return self._blocks

    def _block(self, batches: Iterator[Rows], first: int, num_steps: int) -> Iterator[Rows]:
        for step, batch in enumerate(islice(batches, num_steps), first):
            self._steps = step + 1
            yield batch

    def _batches(self, blocks: Sequence[Sequence[Piece]]) -> Iterator[Rows]:
        pieces = [piece for block in blocks for piece in block]
        with closing(self._read(iter(pieces))) as rows:
            yield from rebatch(rows, self._plan.batch_size)


def digest(value: object) -> str:
    """Return a hash of a JSON value as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def prefetch(make: Callable[[], Iterator[T]], size: int) -> Generator[T, None, None]:
    """Yield the items of ``make()``, which a thread prefetches; ``size`` 0 uses no thread.

    The thread prefetches up to ``size`` items, and ends when this generator is closed. An exception
    in the thread is raised at the position of its item.
    """
    if size == 0:
        yield from make()
        return
    items: queue.Queue[Any] = queue.Queue(size)
    stopped = threading.Event()
    failure: BaseException | None = None

    def fill() -> None:
        nonlocal failure
        try:
            for item in make():
                items.put(item)
                if stopped.is_set():
                    return
        except BaseException as error:
            failure = error
        items.put(_END)

    thread = threading.Thread(target=fill, name="recd-prefetch", daemon=True)
    thread.start()
    try:
        while (item := items.get()) is not _END:
            yield item
        if failure is not None:
            raise failure
    finally:
        stopped.set()
        # Makes room for a waiting put.
        while not items.empty():
            items.get_nowait()
        thread.join()

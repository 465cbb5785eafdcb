"""A reader that reorders the rows within windows of consecutive batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

from recd_plugins.api import DataError, Reader, Rows

State = dict[str, Any]

_STATE_VERSION = 1

#: Hints for error messages, keyed by the value that differs.
_WHY = {
    "hot_rows": " Automatic cache sizes depend on the ranks and the machine. Set rows or share of "
    "scars.cache to resume on another machine."
}


class WindowOrder(Protocol):
    """Reorders the rows within a window of batches."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the order, as a dict of JSON values."""

    def sort(self, window: Sequence[Rows]) -> Iterator[Rows]:
        """Yield the rows of ``window`` in a new order, in batches of the same number and size."""


@dataclass(frozen=True)
class _Window:
    """The batches of a window, and the reader state after each batch."""

    batches: Iterable[Rows]
    positions: Sequence[State]


class WindowReader(Reader):
    """Reader that reorders the rows of another reader within windows of consecutive batches.

    A checkpoint contains the start of the window, the number of ranks, and the total number of
    batches that the ranks have read from the window. So training can resume with a different number
    of ranks. Batches are then read in the same global order: the first batch of every rank's
    window, then the second batch of every rank's window, and so on.

    Args:
        open_inner: function that opens the other reader for a rank and a world size.
        order: reorders the rows within a window.
        num_batches: number of batches in a window.
        rank, world_size: rank of this process and number of ranks.
    """

    def __init__(
        self,
        open_inner: Callable[[int, int], Reader],
        order: WindowOrder,
        *,
        num_batches: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._open = open_inner
        self._order = order
        self._num_batches = num_batches
        self._rank = rank
        self._world_size = world_size
        # Used only for its attributes: each iteration opens its own reader.
        self._inner = open_inner(rank, world_size)
        self._position = self._at_start(self._inner.state_dict())

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Rows]:
        for block in self.blocks(0, 1):
            yield from block

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterator[Rows]]:
        """Yield the batches of each window of this worker. Skips the windows of other workers."""
        inner = self._open(self._rank, self._world_size)
        windows = self._windows(inner, self._position, worker, num_workers)
        for window in windows:
            yield self._block(window)
        self._position = self._at_start(inner.state_dict())

    def state_dict(self) -> State:
        return dict(self._position)

    def load_state_dict(self, state: State) -> None:
        if state.get("version") != _STATE_VERSION or "taken" not in state:
            raise DataError(
                "scars.hot_batches: the checkpoint was saved with other dataset wrappers. Restore "
                "the previous wrap: section of the dataset, or start a new run."
            )
        if state["taken"]:
            for name, mine in self._identity().items():
                if (theirs := state["order"].get(name)) != mine:
                    raise DataError(
                        f"scars.hot_batches: {name!r} is {mine!r}, but the checkpoint was saved "
                        f"with {theirs!r}. Restore the previous options, caches and data, or start "
                        f"a new run.{_WHY.get(name, '')}"
                    )
        self._inner.load_state_dict(state["inner"])
        self._position = dict(state)

    def _block(self, window: _Window) -> Iterator[Rows]:
        for batch, position in zip(window.batches, window.positions, strict=True):
            self._position = position
            yield batch

    def _windows(
        self, inner: Reader, position: State, worker: int, num_workers: int
    ) -> Generator[_Window, None, None]:
        """Yield this worker's windows from ``position`` to the end of the epoch."""
        number = 0
        if position["taken"]:
            rest = self._rest(position)
            if worker == 0:
                yield self._finish(rest)
            inner.load_state_dict(rest.end)
            if rest.num_batches < self._num_batches:
                return
            number = 1
        else:
            inner.load_state_dict(position["inner"])
        batches = None
        for turn in count(number):
            if turn % num_workers != worker:
                batches = None
                if inner.skip(self._num_batches) < self._num_batches:
                    return
                continue
            batches = batches or iter(inner)
            start = inner.state_dict()
            window = list(islice(batches, self._num_batches))
            is_last = len(window) < self._num_batches
            if window:
                end = None if is_last else inner.state_dict()
                firsts = range(0, len(window) * self._world_size, self._world_size)
                positions = self._positions(start, self._world_size, firsts, end)
                yield _Window(self._order.sort(window), positions)
            if is_last:
                return

    def _rest(self, position: State) -> _Rest:
        """Return a description of the unread batches of the window at ``position``."""
        start, world_size = position["inner"], position["world_size"]
        reader = self._open(0, world_size)
        reader.load_state_dict(start)
        num_batches = reader.skip(self._num_batches)
        return _Rest(start, world_size, position["taken"], num_batches, reader.state_dict())

    def _finish(self, rest: _Rest) -> _Window:
        """Read this rank's part of a window that another number of ranks may have read partly.

        Drops the last batches if there are not enough for all ranks.
        """
        mine = rest.share(self._rank, self._world_size)
        batches: dict[int, Rows] = {}
        for rank in sorted({number % rest.world_size for number in mine}):
            reader = self._open(rank, rest.world_size)
            reader.load_state_dict(rest.start)
            window = self._order.sort(list(islice(reader, self._num_batches)))
            for number, batch in zip(count(rank, rest.world_size), window, strict=False):
                if number in mine:
                    batches[number] = batch
        firsts = range(rest.taken, rest.taken + len(mine) * self._world_size, self._world_size)
        end = rest.end if rest.num_batches == self._num_batches else None
        positions = self._positions(rest.start, rest.world_size, firsts, end)
        return _Window([batches[number] for number in mine], positions)

    def _positions(
        self, start: State, world_size: int, firsts: range, end: State | None
    ) -> list[State]:
        """Return the reader state after each step of a window.

        ``firsts`` is the total number of batches that the ranks read before each step. ``end`` is
        the inner reader's state at the start of the next window.
        """
        identity = self._identity() if len(firsts) else {}
        positions = [
            {
                "version": _STATE_VERSION,
                "inner": start,
                "world_size": world_size,
                "taken": first + self._world_size,
                "order": identity,
            }
            for first in firsts
        ]
        if positions and end is not None:
            positions[-1] = self._at_start(end)
        return positions

    def _at_start(self, inner: State) -> State:
        """Return the state of this reader at the start of a window."""
        return {
            "version": _STATE_VERSION,
            "inner": inner,
            "world_size": self._world_size,
            "taken": 0,
            "order": {},
        }

    def _identity(self) -> dict[str, Any]:
        return {"window": self._num_batches, **self._order.identity()}


@dataclass(frozen=True)
class _Rest:
    """The unread batches of a window, after the ranks have read ``taken`` batches in total.

    ``start`` and ``end`` are the states of the inner reader before and after the window.
    """

    start: State
    world_size: int
    taken: int
    num_batches: int
    end: State

    def share(self, rank: int, world_size: int) -> range:
        """Return the indices of the batches for ``rank``. Every rank gets the same number."""
        left = self.num_batches * self.world_size - self.taken
        first = self.taken + rank
        return range(first, first + left // world_size * world_size, world_size)

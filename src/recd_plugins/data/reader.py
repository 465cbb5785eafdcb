"""The reader behind the built-in datasets: a read plan over anything that can read a unit."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate, islice
from typing import Any, TypeVar

from recd_plugins.data.read_plan import History, Piece, ReadPlan, cut_into_blocks
from recd_plugins.data.rows import rebatch
from recd_plugins.errors import DataError
from recd_plugins.interfaces import Reader, Rows

T = TypeVar("T")

#: A generator function that is given pieces and yields their rows: all of them, in the order of the
#: pieces, in batches of any size. It is closed where an epoch is left early.
ReadPieces = Callable[[Iterator[Piece]], Generator[Rows, None, None]]

_STATE_VERSION = 1
# Rows of a block, which a worker holds in memory and hands over at once.
_MOST_ROWS = 16_384
_END = object()


class PlannedReader(Reader):
    """Reads the batches of one rank as a ``ReadPlan`` deals them.

    Args:
        plan: which rows there are.
        read: how they are read, a ``ReadPieces``; a thread calls it unless ``ahead`` is 0.
        data: what the data is, JSON values by name; a state remembers them, and one that remembers
            something else is refused.
        what: the data and split in an error message.
        rank: this process.
        world_size: processes that share the data.
        ahead: batches to read ahead in a thread, 0 for none.

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
                f"{what} has no rows; look at its files, and at conditions and splits that leave "
                "rows out"
            )
        if plan.num_steps(world_size) == 0:
            few = f"{what} has {plan.num_rows} rows, too few for a batch of {plan.batch_size}"
            if world_size > 1:
                few += f" on each of {world_size} ranks"
            or_ranks = " or training.ranks" if world_size > 1 else ""
            raise DataError(f"{few}; lower training.batch_size{or_ranks}")
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

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self._plan.shuffle

    def __len__(self) -> int:
        return self._plan.num_steps(self._world_size)

    def __iter__(self) -> Iterator[Rows]:
        for block in self.blocks(0, 1):
            yield from block

    def blocks(self, worker: int, num_workers: int) -> Iterator[Iterator[Rows]]:
        """A block is about a row group, which no other worker has to decode."""
        blocks, ends = self._cut()
        size = self._plan.batch_size
        mine = slice(worker, None, num_workers)
        with closing(prefetch(lambda: self._batches(blocks[mine]), self._ahead)) as batches:
            for block, end in zip(blocks[mine], ends[mine], strict=True):
                num_steps = sum(piece.num_rows for piece in block) // size
                yield self._block(batches, end - num_steps, num_steps)
            next(batches, None)  # lets files be checked once more at their end
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
                f"the state of {self._what} has version {state.get('version')!r}, "
                f"not {_STATE_VERSION}"
            )
        if "data" not in state:
            raise DataError(
                f"the state is none of {self._what}, but of a wrapper around it: go on with the "
                "former dataset.wrap, or start anew"
            )
        for name, mine in self._data.items():
            if (theirs := state["data"].get(name)) != mine:
                raise DataError(
                    f"the state belongs to other data than {self._what}: {name} was {theirs!r} "
                    f"and is {mine!r}; go on with the former data and options, or start anew"
                )
        history = tuple((world_size, steps) for world_size, steps in state["history"])
        if not self._plan.is_possible(history):
            raise DataError(f"the state of {self._what} has steps past the end: {history}")
        self._epoch, self._steps = state["epoch"], 0
        if history and history[-1][0] == self._world_size:
            *history_before, (_, self._steps) = history
            history = tuple(history_before)
        self._history = history

    def _cut(self) -> tuple[Sequence[tuple[Piece, ...]], Sequence[int]]:
        """The blocks from the current position to the end of the epoch, and the steps after each.

        Kept for the next call: readers ask for block after block from one position.
        """
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
            yield from rebatch(self._counted(rows, pieces), self._plan.batch_size)

    def _counted(self, parts: Iterator[Rows], pieces: Sequence[Piece]) -> Iterator[Rows]:
        """The same, refused unless there are as many rows as in the pieces."""
        num_rows = 0
        for part in parts:
            num_rows += len(part)
            yield part
        if num_rows != (wanted := sum(piece.num_rows for piece in pieces)):
            raise ValueError(
                f"reading {self._what}: {num_rows:,} rows were read of pieces with {wanted:,}"
            )


def digest(value: object) -> str:
    """Return sixteen hex digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def prefetch(make: Callable[[], Iterator[T]], size: int) -> Generator[T, None, None]:
    """Iterate over ``make()`` in a thread that is at most ``size`` items ahead; 0 reads inline.

    An exception in the thread is raised here, in its turn. The thread ends when this iterator is
    exhausted, closed or collected.
    """
    if size == 0:
        yield from make()
        return
    items: queue.Queue[object] = queue.Queue(size)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(make, items, stopped), name="recd-prefetch", daemon=True
    )
    thread.start()
    try:
        while (item := items.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        # Room for the one `put` in which the thread may be waiting.
        while not items.empty():
            items.get_nowait()
        thread.join()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _fill(
    make: Callable[[], Iterator[T]], items: queue.Queue[object], stopped: threading.Event
) -> None:
    last: object = _END
    try:
        for item in make():
            items.put(item)
            if stopped.is_set():
                return
    except BaseException as error:
        last = _Failure(error)
    if not stopped.is_set():
        items.put(last)

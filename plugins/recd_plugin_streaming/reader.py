"""Reader of a stream's batches on one rank, with a position that a checkpoint stores.

A thread reads windows ahead. The position is the set of rows that no yielded batch contains, so a
resumed run trains each row exactly once, also within a window.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from recd_plugin_streaming.columns import StreamOptions
from recd_plugin_streaming.ranges import Left
from recd_plugin_streaming.source import Source
from recd_plugin_streaming.windows import Window, windows
from recd_plugins.api import DataError, Origin, Rows, StreamReader, row_tables

_VERSION = 1
# Windows that the thread reads ahead.
_AHEAD = 4


class WindowReader(StreamReader):
    """Reads the batches of a source.

    Args:
        source: this rank's share of the stream.
        options: options of windows.
        batch_size: rows per batch.
    """

    def __init__(self, source: Source, options: StreamOptions, batch_size: int) -> None:
        self._source, self._options, self._batch_size = source, options, batch_size
        self._loaded: dict[str, Any] | None = None
        self._left: dict[str, Left] = {}
        self._done: dict[str, None] = {}  # an ordered set
        self._pending: deque[Window] = deque()
        self._num_rows = 0  # of pending windows
        self._ended = False
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._queue: queue.Queue[Any] = queue.Queue(_AHEAD)

    def poll(self, seconds: float) -> bool | None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._fill, name="recd-stream", daemon=True)
            self._thread.start()
        deadline = time.monotonic() + seconds
        while self._num_rows < self._batch_size:
            if self._ended:
                return None
            try:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._ended = True
            elif isinstance(item, Window):
                self._pending.append(item)
                self._num_rows += len(item)
                self._remove_finished()
            else:
                self._left = dict(item)
        return True

    def __iter__(self) -> Iterator[Rows]:
        while (found := self.poll(1.0)) is not None:
            if found:
                yield self._next_batch()

    def lag(self) -> int:
        return self._source.lag(self._left, self._done)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "done": list(self._done),
            "ranks": [dict(self._left)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("version") != _VERSION:
            raise DataError(
                f"{self._source.what}: the checkpoint has no position of this stream. Resume with "
                "the version and the dataset that wrote it"
            )
        self._loaded = state

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        by_all = set.intersection(*(set(state["done"]) for state in states))
        finished = Left((), ())
        return {
            "version": _VERSION,
            "done": sorted(by_all),
            "ranks": [
                {name: finished for name in state["done"] if name not in by_all} | left
                for state in states
                for left in state["ranks"]
            ],
        }

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _fill(self) -> None:
        try:
            start = self._source.start(self._start())
            self._put(start)
            chunks = takewhile(lambda _: not self._stopped.is_set(), self._source.chunks())
            for window in windows(chunks, start, self._options):
                self._put(window)
            self._put(None)
        except BaseException as error:
            self._put(error)
        finally:
            self._source.close()

    def _put(self, item: object) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def _start(self) -> dict[str, Left] | None:
        if self._loaded is None:
            return None
        ranks = [
            {name: Left.from_json(left) for name, left in of_rank.items()}
            for of_rank in self._loaded["ranks"]
        ]
        found = dict.fromkeys(self._loaded["done"], Left((), ()))
        found |= self._source.position_of(ranks)
        self._done = dict.fromkeys(name for name, left in found.items() if left.is_done)
        return found

    def _next_batch(self) -> Rows:
        parts = list[Window]()
        missing = self._batch_size
        while missing:
            window = self._pending[0]
            parts.append(window[:missing])
            self._pending[0] = window[missing:]
            missing -= len(parts[-1])
            self._set_position(self._pending[0])
            self._remove_finished()
        self._num_rows -= self._batch_size
        names = np.concatenate([part.partitions for part in parts])
        offsets = np.concatenate([part.offsets for part in parts])

        def named(_: str, row: int) -> str:
            return self._source.place_of(str(names[row]), int(offsets[row]))

        origin = Origin(self._source.what, 0, self._batch_size, named=named)
        rows = row_tables.concat_rows([Rows(part.rows, ()) for part in parts])
        return Rows(rows.data, (origin,))

    def _remove_finished(self) -> None:
        while self._pending and not len(self._pending[0]):
            self._set_position(self._pending.popleft())

    def _set_position(self, window: Window) -> None:
        """Move to the first row of a window."""
        for name in window.after:
            left = window.left(name)
            if left.is_done:
                self._left.pop(name, None)
                self._done[name] = None
            else:
                self._left[name] = left

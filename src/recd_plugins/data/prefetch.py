"""Reading ahead in a thread, by a bounded number of items."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

_END = object()


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
        source = make()
        for item in source:
            items.put(item)
            if stopped.is_set():
                return
    except BaseException as error:
        last = _Failure(error)
    if not stopped.is_set():
        items.put(last)

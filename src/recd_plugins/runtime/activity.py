"""What this process is doing, noted by those who do it: it is told where a run gets no further."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Activity:
    """What the training thread of a process is at.

    Attributes:
        what: in words that follow "is".
        long: whether it may take minutes where nothing is wrong.
        step: optimizer steps done.
        changes: how often this has changed; of a process that gets on it grows.
        processes: those that it waits for, by name.
    """

    what: str = "starting"
    long: bool = True
    step: int = 0
    changes: int = 0
    processes: Mapping[str, int] = field(default_factory=dict)


_current = Activity()


def current() -> Activity:
    """What this process is at."""
    return _current


def start(step: int = 0) -> None:
    """A run begins: its first step, which compiles and warms up, may take long."""
    _set(Activity(step=step))


def reached(step: int) -> None:
    """So many optimizer steps are done."""
    _set(Activity("training", long=False, step=step))


@contextmanager
def doing(
    what: str, *, processes: Mapping[str, int] | None = None, long: bool | None = None
) -> Iterator[None]:
    """A context in which the process is at this; what is long stays so where it is not said."""
    before = _current
    _set(
        replace(
            before,
            what=what,
            processes=processes or {},
            long=before.long if long is None else long,
        )
    )
    try:
        yield
    finally:
        _set(replace(_current, what=before.what, long=before.long, processes=before.processes))


@contextmanager
def said_if_long(seconds: float, text: str) -> Iterator[None]:
    """A context that has ``text`` written to stderr if it is still open after so many seconds."""

    def say() -> None:
        print(text, file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _set(activity: Activity) -> None:
    global _current
    _current = replace(activity, changes=_current.changes + 1)

"""Current activity of this process, for hang reports."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Activity:
    """Activity of the training thread.

    Attributes:
        what: description that completes "the rank is ...".
        long: whether the activity may take minutes in a healthy run.
        step: number of finished optimizer steps.
        changes: number of activity changes so far; it grows as long as the process makes progress.
        processes: processes that the thread waits for, by name.
    """

    what: str = "starting"
    long: bool = True
    step: int = 0
    changes: int = 0
    processes: Mapping[str, int] = field(default_factory=dict)


_current = Activity()


def current() -> Activity:
    """Return the activity of this process."""
    return _current


def start(step: int = 0) -> None:
    """Set the activity at the start of a run. The first step may take long."""
    _set(Activity(step=step))


def reached(step: int) -> None:
    """Set the number of finished optimizer steps."""
    _set(Activity("training", long=False, step=step))


@contextmanager
def doing(
    what: str, *, processes: Mapping[str, int] | None = None, long: bool | None = None
) -> Iterator[None]:
    """Set the activity within this context. ``long=None`` keeps the outer activity's value."""
    before = _current
    long = before.long if long is None else long
    _set(replace(before, what=what, processes=processes or {}, long=long))
    try:
        yield
    finally:
        _set(replace(_current, what=before.what, long=before.long, processes=before.processes))


@contextmanager
def log_if_slow(seconds: float, text: str) -> Iterator[None]:
    """Write ``text`` to stderr if the context is still open after ``seconds``."""
    timer = threading.Timer(seconds, print, [text], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _set(activity: Activity) -> None:
    global _current
    _current = replace(activity, changes=_current.changes + 1)

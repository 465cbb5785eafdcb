"""Records the current activity of the training thread, for messages about hangs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Activity:
    """The current activity of the training thread.

    Attributes:
        what: description that completes "the rank is ...", such as "training".
        long: whether the activity may take minutes in a healthy run.
        step: number of finished optimizer steps.
        changes: number of activity changes so far. It does not grow while the process hangs.
        processes: dict from name to process id of the processes that the thread waits for.
    """

    what: str = "starting"
    long: bool = True
    step: int = 0
    changes: int = 0
    processes: Mapping[str, int] = field(default_factory=dict)


_current = Activity()


def current() -> Activity:
    """Return the current activity of the training thread in this process."""
    return _current


def start(step: int = 0) -> None:
    """Reset the activity at the start of a run. ``step`` is the number of finished steps."""
    _set(Activity(step=step))


def reached(step: int) -> None:
    """Record that ``step`` optimizer steps are finished, and that the thread is training."""
    _set(Activity("training", long=False, step=step))


@contextmanager
def doing(
    what: str, *, processes: Mapping[str, int] | None = None, long: bool | None = None
) -> Iterator[None]:
    """Set the current activity within this context. The arguments are those of ``Activity``.

    ``long=None`` keeps the current value of ``Activity.long``.
    """
    before = _current
    long = before.long if long is None else long
    _set(replace(before, what=what, processes=processes or {}, long=long))
    try:
        yield
    finally:
        _set(replace(_current, what=before.what, long=before.long, processes=before.processes))


@contextmanager
def log_if_slow(seconds: float, text: str) -> Iterator[None]:
    """Write ``text`` to stderr if this context takes longer than ``seconds``."""
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

"""Signals that end a command, which it leaves by an exception, so that no half of a file stays."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from recd_plugins.errors import RunInterrupted

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

# Seconds until a signal comes again whose exception nobody got.
_AGAIN = 0.05


class Ended(KeyboardInterrupt):
    """A signal that ends the program, as Ctrl-C does.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def unwinding() -> Iterator[None]:
    """A context that SIGTERM and SIGHUP leave by an exception, as Ctrl-C does.

    A rank of torchrun may wait for others, out of reach of exceptions: it ends at once.

    Raises:
        Ended: by SIGTERM or SIGHUP.
    """

    def end(number: int, _: object) -> None:
        raise Ended(number)

    ending = () if "RANK" in os.environ else (signal.SIGTERM, signal.SIGHUP)
    mine = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        with _none_lost():
            yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _none_lost() -> Iterator[None]:
    """A context in which a signal comes again that came in a finalizer of garbage.

    Python drops what is raised there: the program would go on as if nobody had asked it to end.
    """
    before = sys.unraisablehook

    def dropped(what: UnraisableHookArgs) -> None:
        error = what.exc_value
        if not isinstance(error, KeyboardInterrupt | RunInterrupted):
            before(what)
            return
        number = getattr(error, "signal", signal.SIGINT)
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = before

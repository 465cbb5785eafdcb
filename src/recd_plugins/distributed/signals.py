"""Signals that end a run, which the process that started ranks passes on to them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import FrameType

from recd_plugins.errors import RunInterrupted, SetupError
from recd_plugins.lasting_output import lasting_output

#: Those that ask a run to end: Ctrl-C, what systemd and Slurm send, and a terminal that has gone.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_BEFORE = "the run was ended before its first step"


def say_that_it_ends(number: int) -> None:
    """Say on stderr what comes of the first signal, and of a second."""
    print(
        f"\n{signal.Signals(number).name}: every rank finishes its step, and a checkpoint is "
        "written where training.checkpoint.path is set; a second one ends the run at once",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def passed_on(ranks: Sequence[BaseProcess]) -> Iterator[None]:
    """A context in which the first of these signals asks ranks to end, by SIGTERM.

    Args:
        ranks: those that were started so far.

    Raises:
        RunInterrupted: they did; or a second one came, and they are still there.
    """
    got = 0

    def receive(number: int, _frame: FrameType | None) -> None:
        nonlocal got
        if got:
            raise RunInterrupted.by(number, "the run was ended at once")
        got = number
        if not ranks:
            raise RunInterrupted.by(number, _BEFORE)
        for rank in ranks:
            rank.terminate()
        say_that_it_ends(number)

    with _received_by(receive):
        try:
            yield
        except RunInterrupted as error:
            error.signal = got or error.signal  # to them it is SIGTERM
            raise
        except SetupError as error:  # by the signal, before they listen to it
            if not got:
                raise
            raise RunInterrupted.by(got, _BEFORE) from error


@contextmanager
def after_training() -> Iterator[None]:
    """A context in which the first of these signals ends nothing: what is left to do is short."""
    got = 0

    def receive(number: int, _frame: FrameType | None) -> None:
        nonlocal got
        if got:
            raise RunInterrupted.by(number, "the run was ended while its figures were written")
        got = number
        print(
            f"\n{signal.Signals(number).name}: training is over, and its figures are still "
            "written; a second one ends the run at once",
            file=sys.stderr,
            flush=True,
        )

    with _received_by(receive):
        yield


@contextmanager
def _received_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    # What ignores Ctrl-C, as a shell's background job, goes on to.
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, receive)
    try:
        with lasting_output():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

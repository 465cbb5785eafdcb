"""Signals that end a command, wherever in it they come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from recd_plugins.cli.exits import Ended, unwinding
from recd_plugins.runtime.errors import RunInterrupted


class Garbage:
    """What sends this process a signal when nobody needs it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def leave_garbage(number: int) -> None:
    """Have a finalizer send a signal, and go on."""
    garbage = Garbage(number)
    del garbage
    wait()


def wait() -> None:
    for _ in range(100):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, Ended), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_in_a_finalizer_is_not_lost(capfd, request, number: int, raised: type) -> None:
    # Programs in the background are started with Ctrl-C ignored.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ignored))
    before = signal.getsignal(number)
    with pytest.raises(raised), unwinding():
        leave_garbage(number)
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err == ""


def test_nor_that_which_ends_a_run() -> None:
    def end(*_: object) -> None:
        raise RunInterrupted.by(signal.SIGTERM, "the run was ended before its first step")

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(RunInterrupted), unwinding():
            leave_garbage(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("argument", ["--version", "no-such-command"])
def test_the_end_of_a_program_looks_for_no_cycles(argument: str) -> None:
    """What torch brings took a rank 3 s, of the 30 that torchrun leaves it after a SIGTERM."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print('left', len(gc.get_objects())))\n"
        "from recd_plugins.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, argument], capture_output=True, text=True, check=False
    )
    assert int(done.stdout.rpartition("left ")[2]) < 1000

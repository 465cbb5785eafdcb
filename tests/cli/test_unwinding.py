"""The end of a command by a signal, and of the program."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from recd_plugins.cli.exits import Ended, unwinding


def test_a_signal_ends_a_command_as_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Ended), unwinding():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


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

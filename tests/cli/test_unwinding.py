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


IN_A_DESTRUCTOR = """
import signal, time
from recd_plugins.cli.exits import unwinding

class Group:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with unwinding():
    try:
        Group()
        time.sleep(30)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    """Python ignores exceptions of destructors, such as that of the regex parser."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_DESTRUCTOR],
        capture_output=True, text=True, timeout=25, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


@pytest.mark.parametrize("argument", ["--version", "--no-such-option"])
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

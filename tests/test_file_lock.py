"""A locked folder has one writer, and is free when that one has ended, however it did."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.file_lock import LOCK, locked_folder

# Holds the lock, and has a child that it forked sleep on after it is killed.
HOLDER = """
import os, sys, time
from pathlib import Path
from recd_plugins.runtime.file_lock import locked_folder
with locked_folder(Path(sys.argv[1])):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(1)
        os.write(said, b".")
        time.sleep(120)
    os.read(heard, 1)  # it has been through what happens after a fork
    print(child, flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> tuple[subprocess.Popen[str], int]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


def test_who_holds_it_is_named_and_a_kill_frees_it(tmp_path: Path) -> None:
    holder, child = hold(tmp_path)
    try:
        told = rf"process {holder.pid} on {re.escape(socket.gethostname())} \(since 20\d\d-.* UTC"
        with pytest.raises(RecdError, match=told), locked_folder(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # still there, and it has no handle
        with locked_folder(tmp_path) as works:
            assert works
    finally:
        os.kill(child, signal.SIGKILL)
    assert not (tmp_path / LOCK).exists()


def test_another_handle_does_not_free_it(tmp_path: Path) -> None:
    """As it does with locks of POSIX, which a process loses by closing any handle of the file."""
    with locked_folder(tmp_path):
        (tmp_path / LOCK).read_bytes()
        with pytest.raises(RecdError, match="is writing there"), locked_folder(tmp_path):
            pass
    with locked_folder(tmp_path):
        pass

"""Makes multiprocessing's fork server ignore signals. The server imports this module first.

The parent process handles Ctrl-C. systemd and Slurm send SIGTERM to all processes of a run: ranks
that finish their step still need the server to start and check reader processes. The server exits
when its users have exited. Processes that it forks handle SIGTERM as usual.
"""

from __future__ import annotations

import os
import signal
import sys

from recd_plugins.runtime.processes import ignore_terminal

_SERVER = os.getpid()


def _end_by_it() -> None:
    if os.getppid() == _SERVER:  # not a grandchild
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    os.register_at_fork(after_in_child=_end_by_it)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignore_terminal()

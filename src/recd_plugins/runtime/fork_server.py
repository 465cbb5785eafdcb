"""Makes the fork server of ranks and readers ignore SIGTERM; the server imports it first.

systemd and Slurm send SIGTERM to all processes of a run at once. While ranks finish
their step, they need the server to start readers and to learn whether a reader is alive. The server
ends with the processes that use it. Processes forked from it handle SIGTERM as usual.
"""

from __future__ import annotations

import os
import signal
import sys

_SERVER = os.getpid()


def _end_by_it() -> None:
    if os.getppid() == _SERVER:  # not a grandchild
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    os.register_at_fork(after_in_child=_end_by_it)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

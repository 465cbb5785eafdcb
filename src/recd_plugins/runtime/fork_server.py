"""First import of the fork server of ranks and readers: lets it outlive SIGTERM.

systemd and Slurm send SIGTERM to all processes of a run at once. Without the server nobody could
start readers, or learn that one lives, while ranks finish their step. It ends with the processes
that know it; processes forked from it end by SIGTERM as usual.
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

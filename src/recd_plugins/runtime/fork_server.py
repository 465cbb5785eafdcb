"""What a server that processes are forked from does first, where this is named before its imports.

SIGTERM may reach all processes of a run at once, as systemd and Slurm send it. The server stays:
without it nobody could start readers, or learn that one lives, while ranks finish their step. It
ends with the processes that know it. What is forked from it ends by SIGTERM, as ever.
"""

from __future__ import annotations

import os
import signal
import sys

_SERVER = os.getpid()


def _end_by_it() -> None:
    if os.getppid() == _SERVER:  # not what such a process forks itself
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# Nothing else that imports this is to outlive a SIGTERM.
if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    os.register_at_fork(after_in_child=_end_by_it)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

"""Ranks of which one gets a signal."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.util import Finalize

from recd_plugins.runtime.signals import Interrupts


def steps_until_asked(rank: int, world_size: int) -> tuple[int, int]:
    """The step after which a rank is to end, and the signal, where only rank 1 gets one."""
    with Interrupts(rank, world_size) as interrupts:
        for step in range(1, 1000):
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001 * rank)
            if number := interrupts.asked():
                return step, number
    raise AssertionError("nobody was asked")


def asked_at_its_end(rank: int, _world_size: int, command: int) -> int:
    """The rank; one of them sends the process of the command a signal as it leaves."""
    if rank == 0:
        Finalize(None, os.kill, (command, signal.SIGTERM), exitpriority=10)
    return rank

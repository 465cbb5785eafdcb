"""Signals that end a run: every rank ends after the same step."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from recd_plugins.distributed.launch import torchrun_rank
from recd_plugins.distributed.rank_process import LAUNCHED
from recd_plugins.distributed.signals import ENDING, say_that_it_ends

# Ranks agree about so often: often enough for a person, too seldom to be felt.
_SECONDS_BETWEEN_ASKING = 1.0
_MOST_STEPS = 50
# torchrun passes a Ctrl-C on that the terminal has sent to its ranks already.
_ONE_CTRL_C = 2.0


def this_command(registry: Path, *, resume: bool) -> str:
    """The command that trains as this process does, for messages.

    Args:
        registry: the registry file; of a program that is not ``recd`` it is all that is known.
        resume: whether it is to go on from the newest checkpoint.
    """
    program, *words = sys.argv
    if Path(program).name != "recd":
        words = ["run", str(registry)]
    words = [word for word in words if word != "--resume"]
    launcher = "" if torchrun_rank() is None else "the same launcher with "
    return launcher + shlex.join(["recd", *words, *(["--resume"] if resume else [])])


class Interrupts:
    """A context in which signals ask this rank to end, and all ranks find out together.

    Ranks that ``recd run`` started leave the others to it, and are told by SIGTERM, which does
    nothing to them after the context. Under torchrun a second signal ends the process at once.

    Args:
        rank: of this process.
        world_size: ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._launched = LAUNCHED in os.environ
        self._got = 0
        self._first = 0.0
        self._before: dict[int, object] = {}
        self._left, self._steps, self._asked = 0, 1, time.monotonic()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # whose signals are
        # Python calls handlers between two of its own instructions alone, and the main thread may
        # wait in native code: a thread reads of signals what the system writes at once.
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="signals").start()
        for number in ENDING:
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._before_wakeup)
        os.close(self._writer)
        for number, handler in self._before.items():
            # A rank that is done is left to hand in its result.
            if not self._launched:
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def asked(self) -> int:
        """The signal that some rank got, 0 for none; to be called after each step, on every rank.

        Most calls answer 0 at once; some are collective.
        """
        if self._world_size == 1:
            return self._got
        self._left -= 1
        if self._left > 0:
            return 0
        now = time.monotonic()
        each = (now - self._asked) / self._steps
        mine = [self._got, max(1, min(_MOST_STEPS, int(_SECONDS_BETWEEN_ASKING / (each + 1e-9))))]
        # How many steps until then, the slowest rank's clock says: the same on all.
        everyone = torch.tensor([mine[0], -mine[1]])
        dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
        got, steps = everyone.tolist()
        self._asked, self._left, self._steps = now, -steps, -steps
        return int(got)

    def _listen(self, reader: int) -> None:
        with suppress(OSError):
            while numbers := os.read(reader, 64):
                for number in numbers:
                    if number in self._before:
                        self._receive(number)
        os.close(reader)

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if not self._got:
            self._got, self._first = number, now
            if self._rank == 0 and not self._launched:
                say_that_it_ends(number)
        elif not self._launched and now - self._first > _ONE_CTRL_C:
            os._exit(128 + number)

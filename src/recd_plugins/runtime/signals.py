"""Signal handling: SIGINT, SIGTERM or SIGHUP ends training on all ranks after the same step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Self

from recd_plugins.report.output import persistent_output
from recd_plugins.runtime.errors import RunInterrupted, SetupError

#: Signals of Ctrl-C, of systemd and Slurm, and of a closed terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Environment variable that marks ranks of ``launch``.
LAUNCHED = "RECD_LAUNCHED"

_BEFORE = "a signal ended the run before its first step"
# Approximate seconds between agreements of the ranks.
_SECONDS_BETWEEN_ASKING = 1.0
_MOST_STEPS = 50
# torchrun forwards a Ctrl-C that the terminal has already sent to its ranks.
_ONE_CTRL_C = 2.0


def _say_that_it_ends(number: int) -> None:
    print(
        f"\n{signal.Signals(number).name}: every rank finishes its step, and a checkpoint is "
        "written if the run has a checkpoint folder. A second signal ends the run immediately.",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def passed_on(ranks: Sequence[BaseProcess]) -> Iterator[None]:
    """Forward the first signal to the ranks as SIGTERM. A second signal raises RunInterrupted."""
    got = 0

    def receive(number: int, _frame: FrameType | None) -> None:
        nonlocal got
        if got and ranks:
            raise RunInterrupted.by(number, "a second signal ended the run immediately")
        got = number
        if not ranks:
            raise RunInterrupted.by(number, _BEFORE)
        for rank in ranks:
            rank.terminate()
        _say_that_it_ends(number)

    with _received_by(receive):
        try:
            yield
        except RunInterrupted as error:
            error.signal = got or error.signal  # ranks got SIGTERM
            raise
        except SetupError as error:  # killed before they listen to the signal
            if not got:
                raise
            raise RunInterrupted.by(got, _BEFORE) from error


@contextmanager
def _received_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, receive)
    try:
        with persistent_output():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """Context in which SIGINT, SIGTERM and SIGHUP ask this rank to end training.

    ``asked`` lets all ranks agree on the last step. Under torchrun, a second signal ends the
    process immediately.
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
            return self
        # The main thread may wait in native code, where Python calls no handlers: a thread reads
        # the wake-up descriptor.
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="signals").start()
        for number in ENDING:
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._before_wakeup)
        os.close(self._writer)
        for number, handler in self._before.items():
            # A rank of ``launch`` still has to send its result.
            if not self._launched:
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    @property
    def received(self) -> bool:
        """Return whether this rank has received a signal."""
        return self._got != 0

    def asked(self, *, at_once: bool = False) -> int:
        """Return the number of a signal that any rank received, or 0.

        All ranks must call it after each step. ``at_once`` compares the ranks in this call;
        otherwise they are compared about once per second.
        """
        import torch
        import torch.distributed as dist

        if self._world_size == 1:
            return self._got
        self._left -= 1
        if self._left > 0 and not at_once:
            return 0
        now = time.monotonic()
        each = (now - self._asked) / self._steps
        steps = max(1, min(_MOST_STEPS, int(_SECONDS_BETWEEN_ASKING / (each + 1e-9))))
        # The slowest rank sets the number of steps until the next agreement.
        everyone = torch.tensor([self._got, -steps])
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
                _say_that_it_ends(number)
        elif not self._launched and now - self._first > _ONE_CTRL_C:
            os._exit(128 + number)

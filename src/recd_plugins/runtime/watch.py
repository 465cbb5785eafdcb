"""Heartbeats of ranks, and detection of hangs and of the rank that caused them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Self

import click

from recd_plugins.runtime import activity
from recd_plugins.runtime.errors import RecdError, SetupError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# Number of checks, and of heartbeats, until a hang is reported.
_LOOKS = 10
_MOST_SECONDS_BETWEEN_LOOKS = 5.0
# A rank that was silent for this share of that time counts as lost.
_SILENCE = 0.25
# Activities within a step; all others are between steps.
_IN_A_STEP = ("training", "reading data")
# Timeouts of collectives, some of which count milliseconds in 31 bits.
_LEAST, _MOST = timedelta(minutes=30), timedelta(days=7)
# They fail after the watch, whose message is more helpful.
_LONGER = 1.2
# Number of heartbeat intervals within which a living rank sends a heartbeat.
_BEATS = 2.5
_PATIENCE = timedelta(seconds=10)


class HangError(SetupError):
    """Raised if the run has made no progress for longer than the hang timeout."""


@dataclass(frozen=True)
class HangLimits:
    """Time limits for a run without progress.

    Attributes:
        notice: seconds without progress until a message on stderr, which is repeated later.
        timeout: seconds without progress until the run ends; None for no limit.
        advice: returns a text that tells the user how to resume the run.
    """

    notice: float
    timeout: float | None
    advice: Callable[[], str]

    @property
    def interval(self) -> float:
        """Return the seconds between two heartbeats of a rank, and between two checks."""
        soonest = min(self.notice, self.timeout or self.notice)
        return min(soonest / _LOOKS, _MOST_SECONDS_BETWEEN_LOOKS)

    @property
    def collectives(self) -> timedelta:
        """Return the timeout for collectives. It is longer than ``timeout``."""
        seconds = min(_LONGER * (self.timeout or 0.0), _MOST.total_seconds())
        return max(timedelta(seconds=seconds), _LEAST)


@dataclass(frozen=True)
class Heartbeat:
    number: int
    host: str
    process: int
    what: str
    long: bool
    step: int
    quiet: float
    collective: str = ""
    waits_for: list[str] = field(default_factory=list)


class Ticks:
    """A clock that stops while this process is stopped by SIGSTOP."""

    def __init__(self, interval: float) -> None:
        self._most = 2 * interval
        self._last = time.monotonic()

    def passed(self) -> float:
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._most), now
        return passed


class Heart:
    """Context with a thread that writes a heartbeat of this rank every ``interval`` seconds."""

    def __init__(
        self, rank: int, interval: float, after_beat: Callable[[float], None] = lambda _: None
    ) -> None:
        self._rank = rank
        self._interval = interval
        self._after_beat = after_beat
        self._number = 0
        self._quiet = 0.0
        self._changes = -1
        self._ticks = Ticks(interval)
        self._main = threading.get_ident()
        self._store: TCPStore | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recd-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        # Connections of the process group block while they wait.
        self._store = connect()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._store is not None:  # else it is connecting
            self._thread.join(timeout=self._interval + 5)

    def _run(self) -> None:
        done = False
        while not done:
            done = self._end.wait(0 if self._number == 0 else self._interval)
            try:
                if self._store is None:
                    if done:
                        return
                    self._store = connect()
                self._store.set(key(self._rank), json.dumps(asdict(self._beat(done))))
                if not done:
                    self._after_beat(self._quiet)
            except RuntimeError:
                # The store has ended, or the network is cut: this connection may stay broken.
                self._store = None

    def _beat(self, done: bool) -> Heartbeat:
        now = activity.current()
        self._number += 1
        passed = self._ticks.passed()
        self._quiet = self._quiet + passed if now.changes == self._changes else 0.0
        self._changes = now.changes
        return Heartbeat(
            number=self._number,
            host=socket.gethostname(),
            process=os.getpid(),
            what="done" if done else now.what,
            long=now.long,
            step=now.step,
            quiet=self._quiet,
            collective=_collective(sys._current_frames().get(self._main)),
            waits_for=[f"{name} (process {process})" for name, process in now.processes.items()],
        )


def key(rank: int) -> str:
    return f"recd/beat/{rank}"


def connect(timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Connect to the TCPStore at ``MASTER_ADDR`` and ``MASTER_PORT``."""
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timeout)


def _beats(store: TCPStore, world_size: int) -> dict[int, Heartbeat]:
    return {
        rank: Heartbeat(**json.loads(store.get(key(rank))))
        for rank in range(world_size)
        if store.check([key(rank)])
    }


def _collective(frame: FrameType | None) -> str:
    """Return the name of the collective that a stack waits in, or an empty string."""
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    # DistributedDataParallel waits in native code that it calls.
    collective = "a collective" if module == "torch.nn.parallel.distributed" else ""
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.distributed.distributed_c10d" and not name.startswith("_"):
            return name
        if module == "torch.autograd.graph":
            return "the backward pass"
        ours = ("torchrec.distributed", "recd_plugins.sharding", "recd_plugins.compat")
        if module.startswith(ours) and "wait" in name:
            collective = "a collective"
        frame = frame.f_back
    return collective


class HangWatch:
    """Reads the heartbeats of all ranks, reports hangs, and ends a run after the hang timeout.

    Activities that may take minutes, such as the first step, are reported but do not end the run.
    """

    def __init__(
        self,
        store: TCPStore,
        world_size: int,
        limits: HangLimits,
        say: Callable[[str], None],
    ) -> None:
        self._store, self._limits, self._say = store, limits, say
        self._ticks = Ticks(limits.interval)
        starting = Heartbeat(0, "", 0, "starting", long=True, step=0, quiet=0.0)
        self._beats = dict.fromkeys(range(world_size), starting)
        self._silent = [0.0] * world_size  # seconds since the last new heartbeat
        self._next_notice = limits.notice
        self._told = 0.0

    @property
    def told(self) -> bool:
        """Return whether a hang is being reported."""
        return self._told > 0

    def look(self, teller: int | None = None) -> None:
        """Check the heartbeats. Report a hang, or raise HangError after the timeout.

        ``teller`` is this rank under torchrun, where only the first live rank prints messages; None
        if a parent process watches the ranks.
        """
        self._read()
        going_on = {rank: beat for rank, beat in self._beats.items() if beat.what != "done"}
        if not going_on:
            return
        first_alive = min((rank for rank in going_on if not self._is_silent(rank)), default=0)
        speaks = teller in (None, first_alive)
        quiet = min(beat.quiet + self._silent[rank] for rank, beat in going_on.items())
        limits = self._limits
        if quiet < min(limits.notice, limits.timeout or limits.notice):
            if self.told and speaks:
                self._say(f"the run makes progress again, after a pause of {self._told:.0f} s")
            self._told, self._next_notice = 0.0, limits.notice
            return
        blamed = self._blamed(going_on)
        lost = any(self._is_lost(rank) for rank in blamed)
        long = any(going_on[rank].long for rank in blamed) and not lost
        over = limits.timeout is not None and quiet >= limits.timeout and not long
        if not over and quiet < self._next_notice:
            return
        self._told = quiet
        self._next_notice = max(2 * self._next_notice, quiet)
        text = f"the run has made no progress for {quiet:.0f} s: {self._story(going_on, blamed)}"
        if over:
            text += (
                f". This exceeds hang_timeout ({limits.timeout:g} s), so the run ends. "
                f"{limits.advice()}"
            )
            raise HangError(text if speaks else "")
        if speaks:
            self._say(text)

    def _read(self) -> None:
        passed = self._ticks.passed()
        for rank, beat in _beats(self._store, len(self._silent)).items():
            if beat.number != self._beats[rank].number:
                self._silent[rank] = -passed
            self._beats[rank] = beat
        self._silent = [seconds + passed for seconds in self._silent]

    def _is_lost(self, rank: int) -> bool:
        return self._beats[rank].number > 0 and self._is_silent(rank)

    def _is_silent(self, rank: int) -> bool:
        return self._silent[rank] > _SILENCE * self._limits.notice

    def _blamed(self, beats: dict[int, Heartbeat]) -> list[int]:
        least = min(beat.step for beat in beats.values())
        return (
            [rank for rank in beats if self._is_lost(rank)]
            or [rank for rank, beat in beats.items() if not beat.collective]
            or [rank for rank, beat in beats.items() if beat.step == least]
        )

    def _story(self, beats: dict[int, Heartbeat], blamed: list[int]) -> str:
        waiting: dict[str, list[int]] = {}
        for rank, beat in beats.items():
            if rank not in blamed:
                waiting.setdefault(_where(beat), []).append(rank)
        culprits = " and ".join(self._culprit(rank, as_subject=not waiting) for rank in blamed)
        if not waiting:
            return culprits
        who = " and ".join(
            f"{_names(ranks)} wait{'s' * (len(ranks) == 1)} {where}"
            for where, ranks in waiting.items()
        )
        return f"{who} for {culprits}"

    def _culprit(self, rank: int, as_subject: bool) -> str:
        beat = self._beats[rank]
        start = f"rank {rank}" if as_subject else f"rank {rank}, which"
        process = f"process {beat.process} of {beat.host}"
        if self._is_lost(rank):
            return f"{start} sends no heartbeats ({process})"
        if beat.collective:
            return f"{start} waits {_where(beat)}"
        text = f"{start} is {'still ' * beat.long}{beat.what}"
        if beat.step:
            in_step = beat.what in _IN_A_STEP
            text += f" in step {beat.step + 1}" if in_step else f" after step {beat.step}"
        if beat.waits_for:
            text += f" and waits for {' and '.join(beat.waits_for)}"
        return text


def _where(beat: Heartbeat) -> str:
    step = f"step {beat.step + 1}" if beat.what in (*_IN_A_STEP, "starting") else ""
    if not beat.collective:
        return f"in {step}" if step else beat.what
    return f"in {beat.collective} of {step}" if step else f"in {beat.collective} ({beat.what})"


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}"


@contextmanager
def watched_by_each_other(rank: int, world_size: int, limits: HangLimits) -> Iterator[None]:
    """Let the ranks of torchrun check each other for hangs within this context.

    If a connection breaks, the SetupError names the rank that was lost.
    """
    if world_size == 1:
        yield
        return
    watch: HangWatch | None = None

    def look(quiet: float) -> None:
        nonlocal watch
        if watch is None:
            watch = HangWatch(
                connect(), world_size, limits, lambda text: click.echo(text, err=True)
            )
        if quiet < limits.notice / 2 and not watch.told:
            return
        try:
            watch.look(teller=rank)
        except HangError as error:
            if str(error):
                click.secho(str(error), fg="red", err=True)
            sys.stdout.flush()
            os._exit(1)
        except RuntimeError:  # its connection is broken: reconnect
            watch = None
            raise

    with Heart(rank, limits.interval, look):
        try:
            yield
        except Exception as error:
            if not is_lost_connection(error):
                raise
            lost = who_is_lost(rank, world_size, limits)
            # Without a lost rank, the checkpoint or plugin of the error is at fault.
            said = f" ({error})" if isinstance(error, RecdError) else ""
            raise SetupError(
                f"rank {rank} lost the connection to other ranks: {lost}{said}. {limits.advice()}"
            ) from error


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an exception says that a collective lost its connection to another rank."""
    import torch.distributed as dist

    cause: BaseException | None = error
    while cause is not None:
        # gloo raises RuntimeErrors with the path of its source.
        of_gloo = isinstance(cause, RuntimeError) and "/gloo/" in str(cause)
        if of_gloo or isinstance(cause, dist.DistError):
            return True
        cause = cause.__cause__
    return False


def who_is_lost(
    rank: int,
    world_size: int,
    limits: HangLimits,
    connect: Callable[[timedelta], TCPStore] = connect,
) -> str:
    """Return a text that names the ranks that have ended or send no heartbeats.

    All ranks return the same text.
    """
    # torchrun keeps its store when it restarts ranks.
    verdict = f"recd/lost/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = connect(_PATIENCE)
        if store.check([verdict]):
            return store.get(verdict).decode()
        gone = _gone(store, rank, world_size, limits.interval)
        found = " and ".join(gone) or (
            "all ranks send heartbeats, so the network failed, or a rank exceeded the timeout of "
            f"collectives ({limits.collectives.total_seconds():,.0f} s)"
        )
        said = store.compare_set(verdict, "", found).decode()
        if rank < int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
            # The store ends with the node of rank 0; let the others ask it first.
            time.sleep(_BEATS * limits.interval)
        return said
    except RuntimeError:
        return (
            f"the node of rank 0 ({os.environ.get('MASTER_ADDR')}) does not answer, because this "
            "node or the network failed"
        )


def _gone(store: TCPStore, rank: int, world_size: int, interval: float) -> list[str]:
    """Describe the ranks that have ended. If none has, describe the ranks without heartbeats."""
    before = after = _beats(store, world_size)
    for _ in range(_LOOKS):
        time.sleep(_BEATS * interval / _LOOKS)
        after = _beats(store, world_size)
        if ended := {other: beat for other, beat in after.items() if beat.what == "done"}:
            return [
                f"rank {r} has ended ({_seen(beat)}); read its output for the cause"
                for r, beat in ended.items()
            ]
    return [
        f"rank {other} sends no heartbeats ({_seen(beat)}): it was killed, or its node failed"
        for other, beat in after.items()
        if other != rank and other in before and beat.number == before[other].number
    ]


def _seen(beat: Heartbeat) -> str:
    return f"process {beat.process} of {beat.host}, last seen in step {beat.step + 1}"

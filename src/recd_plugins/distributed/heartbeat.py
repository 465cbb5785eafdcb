"""Signs of life that a rank gives while it trains, and where it is."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Self

from recd_plugins import activity
from recd_plugins.processes import is_stopped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# Parts of the names of what waits for a collective in TorchRec, and the collective.
_COLLECTIVES = {
    "all2all": "all_to_all",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    # Of what follows: sizes, in an all-to-all of their own.
    "splits": "all_to_all",
}


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    Attributes:
        number: of the beats so far; of a process that is stopped it grows no more.
        host, process: where the rank is.
        what, long, step: as in ``Activity``.
        quiet: seconds for which that has not changed.
        collective: that the rank is in, "" for none.
        waits_for: processes of its own that the rank waits for, in words.
        stuck: of these, process ids of those that are stopped.
    """

    number: int
    host: str
    process: int
    what: str
    long: bool
    step: int
    quiet: float
    collective: str = ""
    waits_for: list[str] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)


class Ticks:
    """A clock that stands still while its process does: a pause of all processes is no hang."""

    def __init__(self, interval: float) -> None:
        self._most = 2 * interval
        self._last = time.monotonic()

    def passed(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._most), now
        return passed


class Heart:
    """A context in which a rank notes every ``interval`` seconds what it is at.

    Args:
        rank: of this process, which has MASTER_ADDR and MASTER_PORT in its environment.
        interval: seconds between beats.
        after_beat: called after each of them in its thread, with the seconds of ``Beat.quiet``.

    Attributes:
        answered: beats after which the store answered what ``after_beat`` asked of it.
    """

    def __init__(
        self, rank: int, interval: float, after_beat: Callable[[float], None] | None = None
    ) -> None:
        self._rank = rank
        self._interval = interval
        self._after_beat = after_beat
        self.answered = 0
        self._number = 0
        self._quiet = 0.0
        self._changes = -1
        self._ticks = Ticks(interval)
        self._main = threading.get_ident()
        self._store: TCPStore | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recd-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        # Its own connection: those of the process group wait in it for others.
        self._store = connect()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._store is not None:  # else it looks for the store, and has nobody to tell
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
                if not done and self._after_beat is not None:
                    self._after_beat(self._quiet)
                self.answered += 1
            except RuntimeError:
                # Who held the store has ended, and ends this process; or the network is cut for a
                # while, after which this connection may not come back.
                self._store = None

    def _beat(self, done: bool) -> Beat:
        now = activity.current()
        self._number += 1
        passed = self._ticks.passed()
        self._quiet = self._quiet + passed if now.changes == self._changes else 0.0
        self._changes = now.changes
        states = {name: is_stopped(process) for name, process in now.processes.items()}
        return Beat(
            number=self._number,
            host=socket.gethostname(),
            process=os.getpid(),
            what="done" if done else now.what,
            long=now.long,
            step=now.step,
            quiet=self._quiet,
            collective=_collective(sys._current_frames().get(self._main)),
            waits_for=[
                f"{name} (process {process})" + (", which is stopped" if states[name] else "")
                for name, process in now.processes.items()
            ],
            stuck=[process for name, process in now.processes.items() if states[name]],
        )


def key(rank: int) -> str:
    """The key of a rank's beat in the store."""
    return f"recd/beat/{rank}"


def connect(timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A connection to the store of the ranks that this process belongs to.

    Raises:
        RuntimeError: it does not answer for so long.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
    )


def _collective(frame: FrameType | None) -> str:
    """What the thread at ``frame`` is in, by the names of the functions that it is in."""
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    # DistributedDataParallel's own, in native code that it calls.
    collective = "a collective" if module == "torch.nn.parallel.distributed" else ""
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module == "torch.distributed.distributed_c10d" and not code.co_name.startswith("_"):
            return code.co_name
        if module == "torch.autograd.graph":
            return "backward"
        if module.startswith(("torchrec.distributed", "recd_plugins.dist")):
            name = code.co_qualname.lower()
            found = next((known for part, known in _COLLECTIVES.items() if part in name), None)
            if "wait" in name:
                if found is not None:
                    return found
                collective = "a collective"
        frame = frame.f_back
    return collective

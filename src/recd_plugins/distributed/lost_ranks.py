"""Which ranks are gone, where a rank of ``torchrun`` loses its connections or the ranks' store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from recd_plugins import activity
from recd_plugins.distributed.heartbeat import Beat, Ticks, key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from recd_plugins.distributed.hang_watch import HangLimits

#: Beats in which a rank that lives gives a sign of it.
_BEATS = 2.5
_LOOKS = 10
_PATIENCE = timedelta(seconds=10)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed as another rank, or its node, was no longer there.

    Whatever was made of it on its way: who loads a checkpoint, or calls a plugin, takes what is
    raised there for the checkpoint's fault, or the plugin's.
    """
    import torch.distributed as dist

    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:  # causes may go round
        seen.append(cause)
        # gloo raises RuntimeErrors with the path of its source.
        of_gloo = isinstance(cause, RuntimeError) and "/gloo/" in str(cause)
        if of_gloo or isinstance(cause, dist.DistError):
            return True
        cause = cause.__cause__
    return False


def who_is_lost(
    connect: Callable[[timedelta], TCPStore], rank: int, world_size: int, limits: HangLimits
) -> str:
    """In words, the same on all ranks that ask: the first that has found out tells the others.

    Takes 2.5 beats where none has said that it ended, as ranks that live beat meanwhile.

    Args:
        connect: to the ranks' store, which has so long to answer.
        rank: that asks.
        world_size: ranks.
        limits: of the run; their interval is that of beats.
    """
    # A launcher that starts ranks anew keeps its store.
    verdict = f"recd/lost/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = connect(_PATIENCE)
        if store.check([verdict]):
            return store.get(verdict).decode()
        gone = _gone(store, rank, world_size, limits.interval)
        found = " and ".join(gone) or (
            "no rank is missed, so the network between them failed, or one took longer than the "
            f"{limits.collectives.total_seconds():,.0f} s that collectives wait"
        )
        said = store.compare_set(verdict, "", found).decode()
        if rank < int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
            # The store ends with the node of rank 0, and others may not have asked it yet.
            time.sleep(_BEATS * limits.interval)
        return said
    except RuntimeError:
        return store_is_lost()


def store_is_lost() -> str:
    """What a rank says that cannot reach the ranks' store."""
    host = os.environ.get("MASTER_ADDR")
    return (
        f"the ranks' store on the node of rank 0 ({host}) does not answer: rank 0's node is lost, "
        "or the network between it and this one"
    )


class StoreWatch:
    """A context in which a rank ends that gets no further and hears nothing of the ranks' store.

    Args:
        limits: how long.
        answered: how often the store has answered.
        end: called with what there is to say; does not return.
    """

    def __init__(
        self, limits: HangLimits, answered: Callable[[], int], end: Callable[[str], None]
    ) -> None:
        self._limits = limits
        self._answered = answered
        self._tell = end
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recd-store-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _run(self) -> None:
        ticks = Ticks(self._limits.interval)
        seconds, last = 0.0, (-1, -1)
        while not self._end.wait(self._limits.interval):
            passed, now = ticks.passed(), (activity.current().changes, self._answered())
            # Either moved: the watch of all ranks looks after the rest.
            seconds = seconds + passed if now == last else 0.0
            last = now
            if self._limits.timeout is not None and seconds >= self._limits.timeout:
                self._tell(f"nothing has moved for {seconds:.0f} s, and {store_is_lost()}")


def _gone(store: TCPStore, rank: int, world_size: int, interval: float) -> list[str]:
    """Those that have ended; where none says so, those that no longer beat."""
    before = _beats(store, world_size)
    for _ in range(_LOOKS):
        time.sleep(_BEATS * interval / _LOOKS)
        after = _beats(store, world_size)
        if ended := [_told(other, beat) for other, beat in after.items() if beat.what == "done"]:
            return ended
    return [
        _told(other, beat)
        for other, beat in after.items()
        if other != rank and other in before and beat.number == before[other].number
    ]


def _beats(store: TCPStore, world_size: int) -> dict[int, Beat]:
    """Of the ranks that have given any."""
    return {
        rank: Beat(**json.loads(store.get(key(rank))))
        for rank in range(world_size)
        if store.check([key(rank)])
    }


def _told(rank: int, beat: Beat) -> str:
    where = f"process {beat.process} of {beat.host}, last seen in step {beat.step + 1}"
    if beat.what == "done":
        return f"rank {rank} has ended ({where}): it says why"
    return f"rank {rank} gives no sign of life ({where}): it was killed, or its node is lost"

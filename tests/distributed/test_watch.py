from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.watch import (
    HangError,
    HangLimits,
    HangWatch,
    Heartbeat,
    is_lost_connection,
    key,
    watched_by_each_other,
    who_is_lost,
)

WAITING = {"what": "training", "collective": "all_to_all", "step": 11}
READING = {"what": "reading data", "step": 11}


def beat(store: HashStore, rank: int, number: int, **fields: Any) -> None:
    beat: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid(), "long": False}
    store.set(key(rank), json.dumps(asdict(Heartbeat(number=number, **{**beat, **fields}))))


class Watched:
    def __init__(self, timeout: float | None = None, notice: float = 60.0) -> None:
        self.said: list[str] = []
        self._store = HashStore()
        limits = HangLimits(notice, timeout, lambda: "This is how to go on.")
        self.watch = HangWatch(self._store, 3, limits, self.said.append)  # type: ignore[arg-type]
        self._numbers = count()

    def beat(self, rank: int, quiet: float, **fields: Any) -> None:
        beat(self._store, rank, next(self._numbers), quiet=quiet, **fields)

    def beats(self, quiet: float, *ranks: dict[str, Any]) -> None:
        for rank, fields in enumerate(ranks):
            self.beat(rank, quiet, **fields)


def test_nothing_is_said_while_one_rank_moves() -> None:
    ranks = Watched()
    ranks.beats(70, WAITING, READING, WAITING)
    ranks.beat(1, 2, **READING)
    ranks.watch.look()
    assert ranks.said == []


SAVING = {"what": "saving a checkpoint", "long": True, "step": 20}
READER = {"waits_for": ["reader worker 3 (process 77)"]}


@pytest.mark.parametrize(
    ("rank_2", "said"),
    [
        (READING | READER, "is reading data in step 12 and waits for reader worker 3 (process 77)"),
        (SAVING, "is still saving a checkpoint after step 20"),
    ],
)
def test_those_in_a_collective_wait_for_those_that_are_not(rank_2: Any, said: str) -> None:
    ranks = Watched(timeout=100 if "long" in rank_2 else None)
    ranks.beats(101, WAITING, WAITING, rank_2)
    ranks.watch.look()
    (line,) = ranks.said
    waits = "the run has made no progress for 101 s: ranks 0 and 1 wait in all_to_all of step 12"
    assert line.endswith(f"{waits} for rank 2, which {said}")


def test_a_hang_ends_the_run_with_the_way_to_go_on() -> None:
    ranks = Watched(timeout=100)
    ranks.beats(101, READING, WAITING, WAITING)
    with pytest.raises(HangError, match=r"hang_timeout \(100 s\), so the run ends. This is how"):
        ranks.watch.look()
    assert ranks.said == []


def test_a_rank_on_another_machine_is_known_by_its_silence() -> None:
    ranks = Watched(notice=0.2)
    ranks.beats(0, WAITING, WAITING | {"host": "elsewhere", "process": 5}, WAITING)
    while not ranks.said:
        ranks.beat(0, 1.0, **WAITING)
        ranks.beat(2, 1.0, **WAITING)
        ranks.watch.look()
    assert ranks.said[0].endswith("for rank 1, which sends no heartbeats (process 5 of elsewhere)")


def wait_for(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_it_beats_on_and_looks_on_when_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_at = partial(TCPStore, "127.0.0.1", is_master=True, wait_for_workers=False)
    store = store_at(port=0)
    port = store.port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def says_that_nothing_moves() -> bool:
        return "made no progress" in capsys.readouterr().err

    with watched_by_each_other(0, 2, HangLimits(0.1, None, lambda: "")):
        wait_for(says_that_nothing_moves)
        del store
        store = store_at(port=port)
        wait_for(lambda: store.check([key(0)]))
        capsys.readouterr()
        wait_for(says_that_nothing_moves)


LIMITS = HangLimits(0.2, 0.1, lambda: "This is how to go on.")


class Lost:
    def __init__(self, alive: set[int]) -> None:
        self.store = HashStore()
        self._alive = alive
        self._numbers = count()
        self._beat(range(3))

    def _beat(self, ranks: Iterable[int]) -> None:
        number = next(self._numbers)
        for rank in ranks:
            of_rank = {"host": f"node{rank}", "process": 70 + rank, "what": "training", "step": 11}
            beat(self.store, rank, number, quiet=0.0, **of_rank)

    def said_by(self, rank: int) -> str:
        said: list[str] = []
        thread = threading.Thread(
            target=lambda: said.append(who_is_lost(rank, 3, LIMITS, lambda _: self.store))  # type: ignore[arg-type, return-value]
        )
        thread.start()
        while thread.is_alive():
            self._beat(self._alive)
            thread.join(0.002)
        return said[0]


def test_the_rank_that_no_longer_beats_is_named_and_all_say_the_same() -> None:
    ranks = Lost(alive={0, 2})
    said = ranks.said_by(0)
    assert said == (
        "rank 1 sends no heartbeats (process 71 of node1, last seen in step 12): it was killed, "
        "or its node failed"
    )
    # By then the first may have gone, too.
    assert Lost(alive=set()).said_by(2).startswith("rank 0 sends no heartbeats")
    ranks._alive = set()
    assert ranks.said_by(2) == said


def test_a_store_that_is_gone_names_the_node_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: timedelta) -> NoReturn:
        raise dist.DistNetworkError("no route to host")

    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    said = who_is_lost(1, 2, LIMITS, connect)  # type: ignore[arg-type]
    assert said.startswith("the node of rank 0 (10.0.0.1) does not answer")


def test_which_errors_are_lost_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(dist.DistError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(milliseconds=1))
    assert is_lost_connection(caught.value)
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"
    assert is_lost_connection(RuntimeError(gloo))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    said = RecdError("step-000000020: cannot be loaded; remove this checkpoint")
    assert not is_lost_connection(said)
    said.__cause__ = RuntimeError(gloo)
    assert is_lost_connection(said)

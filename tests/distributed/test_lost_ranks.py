"""Who is said to be gone where connections break, by the beats that ranks left."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from typing import NoReturn

import pytest
import torch.distributed as dist

from recd_plugins.distributed.hang_watch import HangLimits
from recd_plugins.distributed.heartbeat import Beat, key
from recd_plugins.distributed.lost_ranks import StoreWatch, is_lost_connection, who_is_lost
from recd_plugins.errors import RecdError

LIMITS = HangLimits(0.2, 0.1, lambda: "This is how to go on.")


class Ranks:
    """Beats of three ranks, of which some go on."""

    def __init__(self, alive: set[int]) -> None:
        self.store = dist.HashStore()
        self._alive = alive
        for rank in range(3):
            self.beat(rank, 1)
        self._numbers = iter(range(2, 1000))

    def beat(self, rank: int, number: int, what: str = "training") -> None:
        beat = Beat(number, f"node{rank}", 70 + rank, what, long=False, step=11, quiet=0.0)
        self.store.set(key(rank), json.dumps(asdict(beat)))

    def said_by(self, rank: int) -> str:
        """Asked in a thread, while those that live beat."""
        said: list[str] = []
        thread = threading.Thread(
            target=lambda: said.append(who_is_lost(lambda _: self.store, rank, 3, LIMITS))  # type: ignore[arg-type, return-value]
        )
        thread.start()
        while thread.is_alive():
            number = next(self._numbers)
            for other in self._alive:
                self.beat(other, number)
            thread.join(0.002)
        return said[0]


def test_the_rank_that_no_longer_beats_is_named_and_all_say_the_same() -> None:
    ranks = Ranks(alive={0, 2})
    said = ranks.said_by(0)
    assert said == (
        "rank 1 gives no sign of life (process 71 of node1, last seen in step 12): it was killed, "
        "or its node is lost"
    )
    # By then the first may have gone, too.
    assert Ranks(alive=set()).said_by(2).startswith("rank 0 gives no sign of life")
    ranks._alive = set()
    assert ranks.said_by(2) == said


def test_a_rank_that_has_ended_says_why_itself() -> None:
    ranks = Ranks(alive={0, 2})
    ranks.beat(1, 9, "done")
    assert ranks.said_by(2).startswith("rank 1 has ended (process 71 of node1, ")


def test_the_node_of_rank_0_keeps_the_store_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever started it: torchrun says GROUP_RANK, and Ray Train NODE_RANK."""
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    ranks, limits = Ranks(alive=set()), HangLimits(1, None, lambda: "")
    ranks.beat(1, 9, "done")
    start = time.monotonic()
    assert who_is_lost(lambda _: ranks.store, 0, 3, limits).startswith("rank 1 has ended")  # type: ignore[arg-type, return-value]
    assert time.monotonic() - start > 2.5 * limits.interval


def test_where_all_live_the_network_is_named() -> None:
    assert "the network between them failed" in Ranks(alive={0, 1, 2}).said_by(1)


def test_a_store_that_is_gone_names_the_node_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: timedelta) -> NoReturn:
        raise dist.DistNetworkError("no route to host")

    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    said = who_is_lost(connect, 1, 2, LIMITS)  # type: ignore[arg-type]
    assert said.startswith("the ranks' store on the node of rank 0 (10.0.0.1) does not answer")


def test_which_errors_are_lost_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(dist.DistError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.1))
    assert is_lost_connection(caught.value)
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"
    assert is_lost_connection(RuntimeError(gloo))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    said = RecdError("step-000000020: cannot be loaded; remove this checkpoint")
    assert not is_lost_connection(said)
    said.__cause__ = RuntimeError(gloo)
    assert is_lost_connection(said)


def test_a_rank_ends_that_hears_nothing_and_gets_no_further() -> None:
    ended = threading.Event()
    said: list[str] = []
    heard = iter(range(100_000))

    def end(text: str) -> None:
        said.append(text)
        ended.set()

    with StoreWatch(LIMITS, lambda: next(heard), end):
        assert not ended.wait(0.3)
    with StoreWatch(LIMITS, lambda: 7, end):
        assert ended.wait(10)
    assert said[0].startswith("nothing has moved for 0 s, and the ranks' store on the node of rank")

"""Signs of life of a rank that loses the ranks' store for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch.distributed import TCPStore

from recd_plugins.distributed.hang_watch import HangLimits
from recd_plugins.distributed.heartbeat import key
from recd_plugins.distributed.watched_ranks import watched_by_each_other

LIMITS = HangLimits(0.2, None, lambda: "")


def store_at(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def wait_for(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_it_beats_on_and_looks_on_when_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a cut of the network that was longer than the store's patience."""
    store = store_at(0)
    port = store.port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def says_that_nothing_moves() -> bool:
        return "nothing has moved" in capsys.readouterr().err

    with watched_by_each_other(0, 2, LIMITS):
        wait_for(says_that_nothing_moves)
        del store
        store = store_at(port)
        wait_for(lambda: store.check([key(0)]))
        capsys.readouterr()
        wait_for(says_that_nothing_moves)

"""A data loader of a stream: the ranks take their batches together."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest

from recd_plugins.data import loader as loaders
from recd_plugins.data.loader import DataLoader
from recd_plugins.interfaces import Feed, StreamReader
from recd_plugins.testing.gloo import run_on_ranks


class Numbers(StreamReader):
    """Yields a number for each True of ``ready``; None ends the stream."""

    def __init__(self, ready: list[bool | None]) -> None:
        self.ready, self.count = ready, 0

    def poll(self, seconds: float) -> bool | None:
        while self.ready and self.ready[0] is False:
            self.ready.pop(0)
            time.sleep(seconds / 10)
            return False
        return self.ready[0] if self.ready else False

    def __iter__(self) -> Iterator[Any]:
        while self.ready.pop(0):
            self.count += 1
            yield self.count

    def lag(self) -> int:
        return sum(map(bool, self.ready))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [self.count]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def merge_states(self, states: Any) -> dict[str, Any]:
        return {"counts": [count for state in states for count in state["counts"]]}

    def close(self) -> None:
        self.ready = []


class Same(Feed):
    def read(self, reader: Any) -> Iterator[Any]:
        return iter(reader)


def batches(rank: int, world_size: int, ready: Any, signal: int) -> Any:
    loader = DataLoader(Numbers(ready[rank]), Same(), False, world_size=world_size)
    found: list[Any] = []
    loader.interrupted = lambda: rank == 1 and signal in found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "_SECONDS_OF_POLL", 0.01)
        for _ in range(2):
            for number in loader:
                found.append(number)
            found.append("idle" if loader.is_idle else "end")
    return found, loader.lag, loader.merged(loader.state_dict())


@pytest.mark.parametrize(
    ("ready", "signal", "taken"),
    [
        ([[True] * 5, [True] * 3 + [None]], 9, [1, 2, 3, "end", "end"]),
        ([[True] * 3 + [False] * 9 + [True, None], [True] * 6], 9, [1, 2, 3, "idle", 4, "end"]),
        ([[False] * 9 + [True] * 5, [True] * 5], 2, [1, 2, "end", "end"]),
    ],
)
def test_ranks_take_batches_together(ready: Any, signal: int, taken: list[Any]) -> None:
    (found, lag, state), other = run_on_ranks(batches, 2, ready, signal)
    assert (found, lag, state) == other
    assert found == taken
    count = sum(isinstance(each, int) for each in taken)
    assert state == {"counts": [count, count]}


def test_a_rank_without_rows_is_named() -> None:
    first, second = run_on_ranks(waiting, 2)
    assert first == ""
    assert second.count("rank 1 has had no full batch for 0 s") == 1


def waiting(rank: int, world_size: int) -> str:
    ready: Any = [[True] * 3, [False] * 20 + [True, None]]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(loaders, "_POLLS_UNTIL_TOLD", 5)
        batches(rank, world_size, ready, 9)
    return said.getvalue()

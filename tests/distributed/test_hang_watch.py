"""What is said of ranks that get no further, by the beats that they left."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from recd_plugins.distributed.hang_watch import HangError, HangLimits, HangWatch
from recd_plugins.distributed.heartbeat import Beat, key

WAITING = {"what": "training", "collective": "all_to_all", "step": 11}
READING = {"what": "reading data", "step": 11}


class Ranks:
    """Beats of three ranks, and what a watch says of them."""

    def __init__(self, timeout: float | None = None, notice: float = 60.0) -> None:
        self.said: list[str] = []
        self._store = dist.HashStore()
        limits = HangLimits(notice, timeout, lambda: "This is how to go on.")
        self.watch = HangWatch(self._store, 3, limits, self.said.append)  # type: ignore[arg-type]
        self._number = 0

    def beat(self, rank: int, quiet: float, **fields: Any) -> None:
        self._number += 1
        beat: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid(), "long": False}
        beat |= fields
        beat = asdict(Beat(number=self._number, quiet=quiet, **beat))
        self._store.set(key(rank), json.dumps(beat))

    def beats(self, quiet: float, *ranks: dict[str, Any]) -> None:
        for rank, fields in enumerate(ranks):
            self.beat(rank, quiet, **fields)


def test_nothing_is_said_while_one_rank_moves() -> None:
    ranks = Ranks()
    ranks.beats(70, WAITING, READING, WAITING)
    ranks.beat(1, 2, **READING)
    ranks.watch.look()
    assert ranks.said == []


def test_those_in_a_collective_wait_for_those_that_are_not() -> None:
    ranks = Ranks()
    waits_for = ["reader worker 3 (process 77)"]
    ranks.beats(61, WAITING, READING | {"waits_for": waits_for}, WAITING)
    ranks.watch.look()
    assert ranks.said == [
        "nothing has moved for 61 s: ranks 0 and 2 wait in all_to_all of step 12 for rank 1, which "
        "is reading data in step 12 and waits for reader worker 3 (process 77)"
    ]


def test_it_is_said_again_at_growing_intervals_and_when_it_goes_on() -> None:
    ranks = Ranks()
    for quiet in (61, 70, 119, 130, 200, 250, 3):
        ranks.beats(quiet, WAITING, READING, WAITING)
        ranks.watch.look()
    assert [line.partition(":")[0] for line in ranks.said] == [
        "nothing has moved for 61 s",
        "nothing has moved for 130 s",
        "nothing has moved for 250 s",
        "goes on, after 250 s",
    ]


def test_what_may_take_long_is_told_and_ends_nothing() -> None:
    ranks = Ranks(timeout=100)
    saving = {"what": "saving a checkpoint", "long": True, "step": 20}
    ranks.beats(500, WAITING, WAITING, saving)
    ranks.watch.look()
    (line,) = ranks.said
    assert line.endswith("for rank 2, which is still saving a checkpoint after step 20")


def test_what_does_not_go_on_is_ended_with_the_way_to_go_on() -> None:
    ranks = Ranks(timeout=100)
    ranks.beats(101, WAITING, READING, WAITING)
    with pytest.raises(HangError, match=r"hang_timeout, 100 s: the run is ended. This is how"):
        ranks.watch.look()
    assert ranks.said == []


def test_no_timeout_ends_nothing() -> None:
    ranks = Ranks(timeout=None)
    ranks.beats(1e6, WAITING, READING, WAITING)
    ranks.watch.look()
    assert len(ranks.said) == 1


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, 1800), (300, 1800), (7200, 8640), (1e300, 7 * 86_400)]
)
def test_collectives_outlast_the_timeout(timeout: float | None, seconds: float) -> None:
    assert HangLimits(60, timeout, str).collectives.total_seconds() == seconds


def test_a_stopped_reader_ends_even_what_may_take_long() -> None:
    ranks = Ranks(timeout=100)
    starting = {"what": "reading data", "long": True, "step": 0, "stuck": [77]}
    ranks.beats(101, starting, WAITING, WAITING)
    with pytest.raises(HangError, match=r"rank 0, which is still reading data; kill -CONT 77 lets"):
        ranks.watch.look()


def test_a_rank_on_another_machine_is_known_by_its_silence() -> None:
    ranks = Ranks(notice=0.2)
    ranks.beats(0, WAITING, WAITING | {"host": "elsewhere", "process": 5}, WAITING)
    while not ranks.said:
        ranks.beat(0, 1.0, **WAITING)
        ranks.beat(2, 1.0, **WAITING)
        ranks.watch.look()
    assert ranks.said[0].endswith(
        "for rank 1, which gives no sign of life (process 5 of elsewhere)"
    )


def test_the_first_rank_that_lives_speaks() -> None:
    ranks = Ranks()
    ranks.beats(61, WAITING, READING, WAITING)
    ranks.watch.look(teller=1)
    assert ranks.said == []
    other = Ranks()
    other.beats(61, WAITING, READING, WAITING)
    other.watch.look(teller=0)
    assert len(other.said) == 1


def test_ranks_that_are_done_are_not_waited_for() -> None:
    ranks = Ranks()
    ranks.beats(500, *[{"what": "done", "step": 12}] * 3)
    ranks.watch.look()
    assert ranks.said == []
    ranks.beat(1, 500, **READING)
    ranks.watch.look()
    assert ranks.said == ["nothing has moved for 500 s: rank 1 is reading data in step 12"]

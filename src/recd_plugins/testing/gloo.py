"""Functions on several CPU ranks, for tests: processes start once for each number of ranks."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from recd_plugins.distributed.launch import Ranks

T = TypeVar("T")

_ranks: dict[tuple[int, int], Ranks] = {}
# A test that hangs in a collective fails after this time.
_TIMEOUT = timedelta(seconds=60)


def run_on_ranks(
    function: Callable[..., T], world_size: int, *args: Any, local_world_size: int | None = None
) -> list[T]:
    """``function(rank, world_size, *args)`` on gloo ranks that later calls use again.

    Results, by rank, and errors are those of ``recd_plugins.distributed.launch.Ranks.run``. State
    that a function leaves behind in its process is there in the next call: a test about such state
    uses ``launch``. A failure ends the processes; the next call starts new ones.

    Example::

        def total(rank: int, world_size: int, start: float) -> float:
            value = torch.tensor(start + rank)
            dist.all_reduce(value)
            return value.item()

        assert run_on_ranks(total, 2, 1.0) == [3.0, 3.0]
    """
    key = (world_size, local_world_size or world_size)
    if key not in _ranks or not _ranks[key].alive:
        _ranks[key] = Ranks(
            world_size, timeout=_TIMEOUT, local_world_size=local_world_size, threads=1
        ).__enter__()
    return _ranks[key].run(function, *args)


def end_ranks() -> None:
    """End the processes of ``run_on_ranks``. Happens by itself when the interpreter ends."""
    for ranks in _ranks.values():
        ranks.close()
    _ranks.clear()


atexit.register(end_ranks)

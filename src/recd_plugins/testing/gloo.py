"""Runs test functions on several ranks, in processes that later tests reuse."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, TypeVar
from unittest import SkipTest

from recd_plugins.runtime.launch import Ranks
from recd_plugins.testing.device import DEVICE, backend_of_tests

__all__ = ["end_ranks", "run_on_ranks"]

T = TypeVar("T")

_ranks: dict[tuple[int, int], Ranks] = {}
# A test that hangs in a collective fails after this time.
_TIMEOUT = timedelta(seconds=60)
# Idle ranks use CPU time, too: gloo's threads wake up 100 times per second.
_MOST_RANKS = 6


def run_on_ranks(
    function: Callable[..., T], world_size: int, *args: Any, local_world_size: int | None = None
) -> list[T]:
    """Call ``function(rank, world_size, *args)`` on each of ``world_size`` ranks.

    Later calls with the same world size reuse the processes, so module state persists. If a rank
    fails, all processes end, and the next call starts new ones. Use ``recd_plugins.api.launch`` if
    a test needs new processes.

    The process group supports CPU tensors and tensors on ``testing.device.DEVICE``. The function,
    its arguments and its results are pickled. On a GPU, each rank counts as a separate node.

    Example::

        def total(rank: int, world_size: int, start: float) -> float:
            value = torch.tensor(start + rank)
            dist.all_reduce(value)
            return value.item()

        assert run_on_ranks(total, 2, 1.0) == [3.0, 3.0]

    Returns:
        One result per rank, in rank order.

    Raises:
        RankError: the function raised another exception than RecdError. Contains the traceback.
        RecdError: the function raised this error.
        SetupError: a process was killed or exited.
        unittest.SkipTest: ``local_world_size`` is larger than 1 and ``DEVICE`` is a GPU.
    """
    if DEVICE.type == "cuda":
        if (local_world_size or 1) > 1:
            raise SkipTest("ranks that share one GPU cannot be grouped into nodes")
        local_world_size = 1
    key = (world_size, local_world_size or world_size)
    ranks = _ranks.pop(key, None)
    if ranks is None or not ranks.alive:
        # Not atexit, because multiprocessing processes end without running it.
        Finalize(None, end_ranks, exitpriority=10)
        _end_longest_unused(_MOST_RANKS - world_size)
        ranks = Ranks(
            world_size,
            backend=backend_of_tests(world_size),
            timeout=_TIMEOUT,
            local_world_size=local_world_size,
            threads=1,
        ).__enter__()
    _ranks[key] = ranks
    return ranks.run(function, *args)


def _end_longest_unused(most: int) -> None:
    """End the least recently used processes until at most ``most`` processes run."""
    while _ranks and sum(world_size for world_size, _ in _ranks) > most:
        _ranks.pop(next(iter(_ranks))).close()


def end_ranks() -> None:
    """End all processes that ``run_on_ranks`` has started. Runs when the interpreter exits."""
    for ranks in _ranks.values():
        ranks.close()
    _ranks.clear()

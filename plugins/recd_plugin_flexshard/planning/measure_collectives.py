"""Measures what collectives reach on ranks of this machine, on pretended nodes too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from recd_plugin_flexshard.runtime.groups import tier_groups
from recd_plugins.api.distributed import backend_for, device_of_rank, launch
from recd_plugins.api.planning import CollectiveRate, CollectiveRates, fit_costs

#: Bytes that a rank puts in: latency decides the first, bandwidth the last.
SIZES = (2**12, 2**16, 2**20, 2**22)
_ROUNDS = 9
# What a clock and the start of a collective are off by counts no more.
_LEAST_SECONDS = 1e-5


def measure_collectives(world_size: int, ranks_per_node: int, device_type: str) -> CollectiveRates:
    """Latency and bandwidth of each, fitted to a few sizes, on ranks that are started here.

    Of a group of one rank it is what the call takes.

    Args:
        world_size: ranks.
        ranks_per_node: of them that count as a node.
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL).

    Raises:
        SetupError: the machine does not allow it.
    """
    by_rank = launch(
        _time_collectives,
        world_size,
        device_type,
        backend=backend_for(device_type),
        local_world_size=ranks_per_node,
    )
    # A collective is done when its slowest rank is.
    seconds = {name: np.max([rank[name] for rank in by_rank], axis=0) for name in by_rank[0]}
    return CollectiveRates(**{name: fit_rate(times.tolist()) for name, times in seconds.items()})


def fit_rate(seconds: Sequence[float]) -> CollectiveRate:
    """Latency and bandwidth, of what collectives of ``SIZES`` took."""
    work = np.array([[1.0, size] for size in SIZES])
    latency, per_byte = fit_costs(work, np.array(seconds), least=_LEAST_SECONDS)
    # Where larger ones take no longer, the bandwidth is at least what the largest reached.
    return CollectiveRate(
        bytes_per_second=1 / (per_byte or seconds[-1] / SIZES[-1]), seconds=latency
    )


def _time_collectives(rank: int, world_size: int, device_type: str) -> dict[str, list[float]]:  # noqa: ARG001
    """Median seconds on this rank by collective, one for each of ``SIZES``."""
    device = device_of_rank(device_type)
    groups = tier_groups()
    return {
        "a2a_global": _times(device, groups.cold, _all_to_all),
        "a2a_intra": _times(device, groups.flex, _all_to_all),
        "ar_global": _times(device, groups.hot, _all_reduce),
        "ar_cross": _times(device, groups.flex_gradients, _all_reduce),
    }


_Collective = Callable[[torch.Tensor, dist.ProcessGroup], object]


def _times(device: torch.device, group: dist.ProcessGroup, collective: _Collective) -> list[float]:
    return [_seconds(device, group, collective, size) for size in SIZES]


def _seconds(
    device: torch.device, group: dist.ProcessGroup, collective: _Collective, size: int
) -> float:
    ranks = dist.get_world_size(group)
    values = torch.zeros(size // 4 // ranks * ranks, device=device)
    found = []
    for _ in range(_ROUNDS):
        # All nodes at once, as in training.
        _wait_for(device)
        dist.barrier()
        start = time.perf_counter()
        collective(values, group)
        _wait_for(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _all_to_all(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(values), values, group=group)


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(values, group=group)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

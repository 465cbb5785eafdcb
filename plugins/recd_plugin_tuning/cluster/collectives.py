"""What collectives take by size, alone and two at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from recd_plugin_tuning.cluster.groups import NodeGroups
from recd_plugin_tuning.cluster.timing import (
    Effort,
    MiddleHalf,
    goes_on,
    rounds,
)
from recd_plugins.api import CollectiveRate, CollectiveRates

#: The collectives of ``CollectiveRates`` in words.
NAMES = {
    "a2a_global": "all-to-all, all ranks",
    "a2a_intra": "all-to-all, in a node",
    "ar_global": "all-reduce, all ranks",
    "ar_cross": "all-reduce, across nodes",
}
# Sizes that the bandwidth is told by: of smaller ones latency and what links buffer decide.
_LARGEST = 3
# Rows and columns of matrix products beside a collective, and how many are timed alone.
_PRODUCT, _PRODUCTS = 256, 8

#: Seconds by bytes that a rank puts in, of each collective.
Sweeps = Mapping[str, Mapping[int, MiddleHalf]]
_Collective = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work]


def sweep(
    groups: NodeGroups, device: torch.device, effort: Effort, say: Callable[[str], None]
) -> dict[str, dict[int, MiddleHalf]]:
    """Seconds of each collective by size, until the slowest rank was done. Collective.

    All groups of a kind are at it at once, as in training.
    """
    kinds: dict[str, tuple[_Collective, dist.ProcessGroup]] = {
        "a2a_global": (_all_to_all, groups.everyone),
        "a2a_intra": (_all_to_all, groups.node),
        "ar_global": (_all_reduce, groups.everyone),
        "ar_cross": (_all_reduce, groups.across),
    }
    found = {}
    for name, (collective, group) in kinds.items():
        say(NAMES[name])
        found[name] = _by_size(device, collective, group, effort)
    return found


def _by_size(
    device: torch.device, collective: _Collective, group: dist.ProcessGroup, effort: Effort
) -> dict[int, MiddleHalf]:
    collective(_values(effort.sizes[0], group, device), group).wait()  # connects the ranks
    found: dict[int, MiddleHalf] = {}
    for size in effort.sizes:
        if found and not goes_on(size, (last := max(found)), found[last].median, effort):
            break
        values = _values(size, group, device)
        _, slowest = rounds(lambda values=values: collective(values, group).wait(), device, effort)  # type: ignore[misc]
        found[size] = MiddleHalf.of(slowest)
    return found


def hidden_share(groups: NodeGroups, device: torch.device, sweeps: Sweeps, effort: Effort) -> float:
    """Share of an all-reduce that is over when ranks have computed beside it for as long.

    0 where it is processors that it takes: ranks that share them compute slower then. Collective.
    """
    sizes = sweeps["ar_global"]
    short = [size for size, spread in sizes.items() if spread.median <= effort.seconds]
    size = max(short, default=min(sizes))
    values = _values(size, groups.everyone, device)
    matrix = torch.ones(_PRODUCT, _PRODUCT, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    def beside(times: int) -> None:
        work = _all_reduce(values, groups.everyone)
        compute(times)
        work.wait()

    def seconds(run: Callable[[], object]) -> float:
        _, slowest = rounds(run, device, effort)
        return MiddleHalf.of(slowest).low

    some = seconds(lambda: compute(_PRODUCTS))
    reduced = seconds(lambda: _all_reduce(values, groups.everyone).wait())
    times = max(1, round(_PRODUCTS * reduced / some))
    computed, both = seconds(lambda: compute(times)), seconds(lambda: beside(times))
    return min(1.0, max(0.0, (reduced + computed - both) / min(reduced, computed)))


def fit_rates(sweeps: Sweeps) -> CollectiveRates:
    """Latency and bandwidth of each, by the faster rounds.

    gloo's all-reduce polls: ranks that share cores take them from one another when they come at the
    same moment, as they do here and seldom in a step.
    """
    return CollectiveRates(
        **{
            name: fit_rate({size: spread.low for size, spread in sizes.items()})
            for name, sizes in sweeps.items()
        }
    )


def fit_rate(seconds: Mapping[int, float]) -> CollectiveRate:
    """Latency and bandwidth of what took so long by bytes.

    The bandwidth is the median slope between the largest sizes, since links that are limited let
    some bytes through at once; the latency is what the fastest size takes, which is a small one.
    """
    sizes = sorted(seconds)
    per_byte = _seconds_per_byte(seconds)
    if per_byte <= 0:
        # Larger ones take no longer: the bandwidth is at least what the largest reached.
        return CollectiveRate(
            bytes_per_second=sizes[-1] / seconds[sizes[-1]], seconds=min(seconds.values())
        )
    return CollectiveRate(
        bytes_per_second=1 / per_byte,
        seconds=max(0.0, min(seconds.values()) - sizes[0] * per_byte),
    )


def _seconds_per_byte(seconds: Mapping[int, float]) -> float:
    sizes = sorted(seconds)[-_LARGEST:]
    slopes = [
        (seconds[large] - seconds[small]) / (large - small)
        for small, large in combinations(sizes, 2)
    ]
    return median(slopes) if slopes else 0.0


def _values(size: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    return torch.zeros(max(1, size // 4 // ranks) * ranks, device=device)


def _all_to_all(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_to_all_single(torch.empty_like(values), values, group=group, async_op=True)
    assert work is not None, "asynchronous"
    return work


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None, "asynchronous"
    return work

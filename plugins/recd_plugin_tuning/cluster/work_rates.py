"""How long it takes what ranks do by themselves, all of a node at once, as they share its cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist

from recd_plugin_tuning.cluster.timing import LEAST_ROUNDS, Effort, MiddleHalf, wait_for
from recd_plugin_tuning.cluster.works import (
    ATTENTIONS,
    LOOKUPS,
    PRODUCTS,
    WORKS,
    Timed,
    works_of,
)
from recd_plugins.api import fit_costs

# Each is timed again when all others were: what slows a machine for a moment slows one turn.
_TURNS = 3
# Of rounds that do not count: the heap grows in them, page by page, to what a round takes.
_GROWING_SECONDS = 0.04
_LEAST_SECONDS = 1e-6
# So long all ranks compute at once to see what share of a processor each of them has.
_SHARING_SECONDS = 0.3
# A step comes to each thing once, when caches of processors hold others: so much is touched before
# each round, which of caches that cores share is a part. Of a step of 80 ms (PAPERCAL, all tables
# coalesced, four ranks of two cores) 67 and 61 were predicted without, 74 and 75 with it.
_OTHER_BYTES = 1 << 23
# Of a turn: more rounds tell no more, and what is touched between them takes its time, too.
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class WorkRates:
    """What a rank does, over all ranks.

    Attributes:
        rates: bytes, operations or ids a second by name of ``WORKS``; of GPUs on CUDA alone.
        lookup: what embeddings cost, as the section ``costs.lookup`` of a topology has it.
        gemm: what matrix products and attention cost, as ``costs.gemm``.
        timed: seconds of each that these were fitted to.
    """

    rates: Mapping[str, MiddleHalf]
    lookup: Mapping[str, float]
    gemm: Mapping[str, float]
    timed: Mapping[Timed, MiddleHalf]


def measure_work(device: torch.device, effort: Effort, say: Callable[[str], None]) -> WorkRates:
    """Collective; each rank is timed by itself, while the others do the same."""
    works, products = works_of(device), PRODUCTS[device.type]
    fitted_to: tuple[Timed, ...] = (*LOOKUPS, *products, *ATTENTIONS)
    named = {WORKS[name]: run for name, (_, run) in works.items()}
    runs = named | {str(each): each.on(device) for each in fitted_to}
    turns: dict[str, list[Sequence[float]]] = {words: [] for words in runs}
    for turn in range(_TURNS):
        for words, run in runs.items():
            if not turn:
                say(words)
                _rounds(run, device, _GROWING_SECONDS)
            turns[words].append(of_all_ranks(run, device, effort.seconds / _TURNS))
    by_rank = {words: np.median(seconds, axis=0) for words, seconds in turns.items()}
    rates = {
        name: MiddleHalf.of((amount / by_rank[WORKS[name]]).tolist())
        for name, (amount, _) in works.items()
    }
    timed = {each: MiddleHalf.of(by_rank[str(each)].tolist()) for each in fitted_to}
    (flops,) = products[0].work
    rates["matmul"] = MiddleHalf.of((flops / by_rank[str(products[0])]).tolist())
    by_lookup = ("lookups", "bytes_looked_up", "ids_looked_up", "rows_updated")
    gemm = {
        **_fitted(("matmul_flops",), products, timed),
        **_fitted(("attention_flops",), ATTENTIONS, timed),
    }
    return WorkRates(rates, _fitted(by_lookup, LOOKUPS, timed), gemm, timed)


def _fitted(
    names: Sequence[str], fitted_to: Sequence[Timed], timed: Mapping[Timed, MiddleHalf]
) -> dict[str, float]:
    """The cost of each of what ``work`` has, by name."""
    work = np.array([each.work for each in fitted_to])
    measured = np.array([timed[each].median for each in fitted_to])
    found = fit_costs(work, measured, least=_LEAST_SECONDS)
    return dict(zip(names, found.tolist(), strict=True))


def of_all_ranks(run: Callable[[], object], device: torch.device, least: float) -> list[float]:
    """Seconds of each rank, the mean: ranks that share cores wait for one now and then. Collective.

    Args:
        run: what is timed.
        device: that it runs on.
        least: seconds that it is done for at least.
    """
    dist.barrier()
    mean = fmean(_rounds(run, device, least))
    # Ranks leave a barrier one after the other: who is done goes on, or the last had cores alone.
    others = dist.barrier(async_op=True)
    assert others is not None, "asynchronous"
    while not others.is_completed():
        run()
        wait_for(device)
    others.wait()
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, mean)
    return everyone


def alone_share(device: torch.device, effort: Effort) -> float:
    """Of what a rank takes while all compute, the share that it takes while others wait.

    That is its time on processors: 1 where ranks have some of their own. Collective.
    """
    _, run = works_of(device)["operators"]
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    _rounds(run, device, min(effort.seconds, _SHARING_SECONDS))
    share = (time.process_time() - processor) / (time.perf_counter() - start)
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, share)
    return min(1.0, median(everyone))


def _rounds(run: Callable[[], object], device: torch.device, least: float) -> list[float]:
    """Seconds of each, ``least`` of all together unless that takes very many."""
    seconds: list[float] = []
    others = torch.zeros(_OTHER_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
    while len(seconds) < LEAST_ROUNDS or (len(seconds) < _MOST_ROUNDS and sum(seconds) < least):
        others.add_(1)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds

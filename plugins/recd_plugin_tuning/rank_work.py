"""Time the work of ranks by themselves: lookups, products, copies, operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from recd_plugins.api import doing, fit_costs, unique_ids, use_row_wise_adagrad

#: Rounds of one thing at least.
LEAST_ROUNDS = 3


# Turns of steps that follow one another, and seconds of one at least. Of some 7 rounds with a
# barrier before each, a collective came to 2.9 to 7.0 ms from start to start, 4 ranks of 2 cores.
_TURNS, _TURN_SECONDS = 3, 0.3
# Up to so many bytes latency is most of what a collective takes.
_LATENCY_BYTES = 1 << 16


@dataclass(frozen=True)
class Effort:
    """How long a cluster is measured.

    Attributes:
        sizes: bytes that a rank puts into a collective: latency decides the first, bandwidth the
            last.
        rounds: of one thing at most.
        seconds: for one thing, after which no round follows the first ``LEAST_ROUNDS``.
        most_seconds: a size whose first rounds would take longer is left out.
        partners: nodes, and ranks of its node, that each exchanges with one after the other.
    """

    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    most_seconds: float
    partners: int


#: One or two minutes.
FULL = Effort(tuple(2**n for n in (8, 12, 14, 16, 18, 20, 22, 24)), 15, 2.0, 8.0, 7)
#: 10 to 20 seconds.
QUICK = Effort(tuple(2**n for n in (8, 17, 19, 20, 22)), 15, 0.15, 0.8, 1)


@dataclass(frozen=True)
class MiddleHalf:
    """The median of rounds or ranks, and between what the middle half of them lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of one value or more."""
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        return cls(median, low, high)


def rounds(
    run: Callable[[], object], device: torch.device, effort: Effort
) -> tuple[list[float], list[float]]:
    """Seconds of ``run`` by round: on this rank, and until the slowest was done. Collective."""
    own: list[float] = []
    slowest: list[float] = []
    while len(own) < LEAST_ROUNDS or (len(own) < effort.rounds and sum(slowest) < effort.seconds):
        with doing("measuring", long=False):
            wait_for(device)
            dist.barrier()
            start = time.perf_counter()
            run()
            wait_for(device)
            own.append(time.perf_counter() - start)
            longest = torch.tensor([own[-1]], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        slowest.append(longest.item())
    return own, slowest


def steps_in_a_row(step: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return seconds of a step if ranks go on from one to the next, as in training. Collective."""

    def turn(steps: int) -> float:
        with doing("measuring", long=False):
            wait_for(device)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            wait_for(device)
            ranks = [0.0] * dist.get_world_size()
            dist.all_gather_object(ranks, time.perf_counter() - start)
        return fmean(ranks) / steps

    first = turn(LEAST_ROUNDS)  # the same on all ranks, as all later turns need
    least = max(_TURN_SECONDS, effort.seconds / 2)
    steps = max(LEAST_ROUNDS, round(least / first)) if effort.seconds else LEAST_ROUNDS
    return sorted(turn(steps) for _ in range(_TURNS))[_TURNS // 2]


def goes_on(size: int, last_size: int, last_seconds: float, effort: Effort) -> bool:
    """Whether there is time for a larger size, by what the one before took."""
    if last_size <= _LATENCY_BYTES:
        # Of latency alone no bandwidth can be told, however long ranks waited for one another.
        return True
    return LEAST_ROUNDS * last_seconds * size / last_size <= effort.most_seconds


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: What a rank does by itself, in words.
WORKS = {
    "copy": "copies in memory",
    "device_copy": "copies in a GPU's memory",
    "to_device": "copies to a GPU",
    "elements": "rows moved and added, bytes read or written",
    "operators": "operators that do next to nothing",
    "matmul": "matrix products",
    "unique": "making ids unique",
}

# More than caches of a processor hold, and rows that an operation of a step moves: of processors
# no more than a core's cache holds.
_COPIED_BYTES, _MOVED = 1 << 26, {"cpu": (1 << 14, 16), "cuda": (1 << 16, 16)}
# Ids that are made unique, of so many distinct ones.
_IDS, _DISTINCT_IDS = 1 << 16, 1 << 13
_OPERATORS = 100
_SCALAR_BYTES = 4
# Products that are timed together: autograd starts once for all of a step.
_PRODUCTS_AT_ONCE = 4


@dataclass(frozen=True)
class Lookup:
    """Lookups of tables in one call, by FBGEMM with row-wise Adagrad, and back.

    Attributes:
        ids: of all tables.
        dim: columns.
        rows: of each table, that these ids are spread over evenly.
        tables: as many.
    """

    ids: int
    dim: int
    rows: int
    tables: int = 1

    def __str__(self) -> str:
        where = f"{self.tables} x {self.rows:,} rows"
        return f"lookup of {self.ids:,} ids, dim {self.dim}, in {where}, and back"

    @property
    def work(self) -> tuple[float, ...]:
        """Calls, bytes, ids and rows that learn."""
        touched = self.rows * (1 - (1 - 1 / self.rows) ** (self.ids / self.tables))
        return 1.0, self.ids * self.dim * _SCALAR_BYTES, self.ids, self.tables * touched

    def on(self, device: torch.device) -> Callable[[], object]:
        """What does it once, on tensors that are there."""
        on_cuda = device.type == "cuda"
        where = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
        kernel: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(self.rows, self.dim, where, compute)] * self.tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            pooling_mode=PoolingMode.SUM,
            device=device,
        )
        use_row_wise_adagrad(kernel)  # as tables of ours learn
        rows = torch.randint(self.rows, (self.ids,), generator=torch.Generator().manual_seed(0))
        # Bags of one id, as those of sequences are.
        rows, offsets = rows.to(device), torch.arange(self.ids + 1, device=device)
        gradient = torch.ones(self.ids // self.tables, self.tables * self.dim, device=device)
        return lambda: kernel(rows, offsets).backward(gradient)


@dataclass(frozen=True)
class Product:
    """Some matrix products ``[rows, inner] @ [inner, columns]``, and back."""

    rows: int
    inner: int
    columns: int

    def __str__(self) -> str:
        shape = f"{self.rows:,} x {self.inner:,} x {self.columns:,}"
        return f"{_PRODUCTS_AT_ONCE} products of {shape}, and back"

    @property
    def work(self) -> tuple[float]:
        """Operations: one product forward and two backward."""
        return (6.0 * _PRODUCTS_AT_ONCE * self.rows * self.inner * self.columns,)

    def on(self, device: torch.device) -> Callable[[], object]:
        """What does it once, on tensors that are there."""
        # None is drawn: a run whose start this is goes on with the generators as they are.
        leaf = partial(torch.ones, device=device, requires_grad=True)
        values = [leaf(self.rows, self.inner) for _ in range(_PRODUCTS_AT_ONCE)]
        weights = [leaf(self.inner, self.columns) for _ in values]
        ones = [torch.ones(self.rows, self.columns, device=device) for _ in values]

        def run() -> object:
            made = [value @ weight for value, weight in zip(values, weights, strict=True)]
            return torch.autograd.grad(made, values + weights, ones)

        return run


#: What costs are fitted to.
Timed = Lookup | Product

#: Of more rows than caches of a processor hold, which are read once or twice; and of few, whose ids
#: repeat: what an id costs beside what a row does.
LOOKUPS = (
    Lookup(1 << 11, 16, 1 << 20),
    Lookup(1 << 14, 16, 1 << 20),
    Lookup(1 << 11, 128, 1 << 17),
    Lookup(1 << 14, 128, 1 << 17),
    Lookup(1 << 16, 16, 1 << 8),
    Lookup(1 << 14, 128, 1 << 8),
    Lookup(1 << 11, 16, 1 << 16, tables=16),
)
PRODUCTS = {
    "cpu": (Product(256, 512, 256), Product(128, 256, 64)),
    "cuda": (Product(4096, 4096, 4096), Product(4096, 256, 64)),
}


def works_of(device: torch.device) -> dict[str, tuple[float, Callable[[], object]]]:
    """Others of ``WORKS``: how much each is, and what does it once."""
    source, target = (torch.zeros(_COPIED_BYTES // _SCALAR_BYTES) for _ in range(2))
    found: dict[str, tuple[float, Callable[[], object]]] = {
        "copy": (2.0 * _COPIED_BYTES, lambda: target.copy_(source))
    }
    if device.type == "cuda":
        pinned = source.pin_memory()
        here, there = (torch.zeros_like(source, device=device) for _ in range(2))
        found["device_copy"] = 2.0 * _COPIED_BYTES, lambda: there.copy_(here)
        found["to_device"] = float(_COPIED_BYTES), lambda: there.copy_(pinned, non_blocking=True)
    moved = torch.zeros(_MOVED[device.type], device=device)
    places = torch.randperm(len(moved), generator=torch.Generator().manual_seed(0)).to(device)

    def elements() -> object:
        taken = moved.index_select(0, places)
        return moved.index_add_(0, places, taken + taken)

    # The first reads one and writes one, the others read two each.
    found["elements"] = 8.0 * moved.numel() * _SCALAR_BYTES, elements
    number = torch.ones(1, device=device, requires_grad=True)

    def operators() -> object:
        product = number
        for _ in range(_OPERATORS):
            product = product * 1.0
        return torch.autograd.grad(product, number)

    # Forward and backward.
    found["operators"] = 2.0 * _OPERATORS, operators
    ids = torch.randint(_DISTINCT_IDS, (_IDS,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    found["unique"] = float(_IDS), lambda: unique_ids(ids, [_IDS])
    return found


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
    """Time each kind of work on every rank while the others do the same. Collective."""
    works, products = works_of(device), PRODUCTS[device.type]
    fitted_to: tuple[Timed, ...] = (*LOOKUPS, *products)
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
    gemm = _fitted(("matmul_flops",), products, timed)
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

"""Times the local work of ranks: lookups, matrix products, copies and small operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean, median
from typing import Any

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
from numpy.typing import NDArray

from recd_plugins.api import doing, unique_ids

#: Minimum number of rounds of each measurement.
LEAST_ROUNDS = 3
# Turns of consecutive steps, and seconds of each.
_TURNS, _TURN_SECONDS = 3, 0.3
# Latency dominates smaller collectives.
_LATENCY_BYTES = 1 << 16


@dataclass(frozen=True)
class Effort:
    """Limits of a measurement.

    Attributes:
        sizes: bytes per rank in collectives.
        rounds: maximum number of timed runs.
        seconds: time limit for all runs, except the first ``LEAST_ROUNDS``.
        most_seconds: sizes whose first ``LEAST_ROUNDS`` runs would take longer are skipped.
    """

    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    most_seconds: float


#: Takes one or two minutes.
FULL = Effort(tuple(2**n for n in (8, 12, 14, 16, 18, 20, 22, 24)), 15, 2.0, 8.0)
#: Takes 10 to 20 seconds.
QUICK = Effort(tuple(2**n for n in (8, 17, 19, 20, 22)), 15, 0.15, 0.8)


def rounds(run: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return the 25th percentile of the seconds of ``run`` on the slowest rank. Collective call."""
    seconds: list[float] = []
    while len(seconds) < LEAST_ROUNDS or (
        len(seconds) < effort.rounds and sum(seconds) < effort.seconds
    ):
        with doing("measuring", long=False):
            wait_for(device)
            dist.barrier()
            start = time.perf_counter()
            run()
            wait_for(device)
            longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        seconds.append(longest.item())
    return float(np.percentile(seconds, 25))


def steps_in_a_row(step: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return seconds per step of consecutive steps without barriers. Collective call."""

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

    first = turn(LEAST_ROUNDS)  # The same on all ranks, so that all run the same number of steps.
    least = max(_TURN_SECONDS, effort.seconds / 2)
    steps = max(LEAST_ROUNDS, round(least / first)) if effort.seconds else LEAST_ROUNDS
    return median(turn(steps) for _ in range(_TURNS))


def goes_on(size: int, last_size: int, last_seconds: float, effort: Effort) -> bool:
    """Return whether there is time to measure the larger size ``size``, in bytes."""
    if last_size <= _LATENCY_BYTES:  # Small sizes measure latency, not bandwidth.
        return True
    return LEAST_ROUNDS * last_seconds * size / last_size <= effort.most_seconds


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: Descriptions of local work.
WORKS = {
    "copy": "copies in memory",
    "device_copy": "copies in a GPU's memory",
    "to_device": "copies to a GPU",
    "elements": "gathering and adding rows, in bytes read or written",
    "operators": "operators on tiny tensors",
    "matmul": "matrix products",
    "unique": "making ids unique",
}

# Bytes to copy, more than fit processor caches; shape of the rows moved by an operation.
_COPIED_BYTES, _MOVED = 1 << 26, {"cpu": (1 << 14, 16), "cuda": (1 << 16, 16)}
# Number of ids to deduplicate, and of distinct ids.
_IDS, _DISTINCT_IDS = 1 << 16, 1 << 13
_OPERATORS = 100
_SCALAR_BYTES = 4
# Products per run, as autograd starts once per step.
_PRODUCTS_AT_ONCE = 4


@dataclass(frozen=True)
class Lookup:
    """A forward and backward lookup in one FBGEMM call with row-wise Adagrad.

    Attributes:
        ids: number of ids over all tables, spread evenly over rows.
        dim: embedding dimension.
        rows: rows per table.
        tables: number of tables.
    """

    ids: int
    dim: int
    rows: int
    tables: int = 1

    def __str__(self) -> str:
        where = f"{self.tables} x {self.rows:,} rows"
        return f"lookup of {self.ids:,} ids, dim {self.dim}, in {where}, forward and backward"

    @property
    def work(self) -> tuple[float, ...]:
        """Return the numbers of calls, bytes, ids and updated rows, to fit their costs."""
        touched = self.rows * (1 - (1 - 1 / self.rows) ** (self.ids / self.tables))
        return 1.0, self.ids * self.dim * _SCALAR_BYTES, self.ids, self.tables * touched

    def on(self, device: torch.device) -> Callable[[], object]:
        """Return a function that runs the lookup once on a device."""
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
        rows = torch.randint(self.rows, (self.ids,), generator=torch.Generator().manual_seed(0))
        # Bags of one id, as for sequences.
        rows, offsets = rows.to(device), torch.arange(self.ids + 1, device=device)
        gradient = torch.ones(self.ids // self.tables, self.tables * self.dim, device=device)
        return lambda: kernel(rows, offsets).backward(gradient)


@dataclass(frozen=True)
class Product:
    """Matrix products ``[rows, inner] @ [inner, columns]``, forward and backward."""

    rows: int
    inner: int
    columns: int

    def __str__(self) -> str:
        shape = f"{self.rows:,} x {self.inner:,} x {self.columns:,}"
        return f"{_PRODUCTS_AT_ONCE} products of {shape}, forward and backward"

    @property
    def work(self) -> tuple[float]:
        """Return the floating-point operations of one forward and two backward products."""
        return (6.0 * _PRODUCTS_AT_ONCE * self.rows * self.inner * self.columns,)

    def on(self, device: torch.device) -> Callable[[], object]:
        """Return a function that runs the products once on a device."""
        # Uses no global random state, so that a training run in this process is not affected.
        leaf = partial(torch.ones, device=device, requires_grad=True)
        values = [leaf(self.rows, self.inner) for _ in range(_PRODUCTS_AT_ONCE)]
        weights = [leaf(self.inner, self.columns) for _ in values]
        ones = [torch.ones(self.rows, self.columns, device=device) for _ in values]

        def run() -> object:
            made = [value @ weight for value, weight in zip(values, weights, strict=True)]
            return torch.autograd.grad(made, values + weights, ones)

        return run


#: Measurements that costs are fitted to.
Timed = Lookup | Product

#: Tables larger than processor caches, and small ones with repeated ids to separate both costs.
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
    """Return a dict from name in ``WORKS`` to its amount of work and a function to run it."""
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

    # Bytes: index_select reads and writes once; the addition and index_add_ move three times each.
    found["elements"] = 8.0 * moved.numel() * _SCALAR_BYTES, elements
    number = torch.ones(1, device=device, requires_grad=True)

    def operators() -> object:
        product = number
        for _ in range(_OPERATORS):
            product = product * 1.0
        return torch.autograd.grad(product, number)

    found["operators"] = 2.0 * _OPERATORS, operators  # forward and backward
    ids = torch.randint(_DISTINCT_IDS, (_IDS,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    found["unique"] = float(_IDS), lambda: unique_ids(ids, [_IDS])
    return found


# Seconds of warm-up, while the heap grows.
_GROWING_SECONDS = 0.04
_LEAST_SECONDS = 1e-6
# Bytes touched before each round to evict caches, as between training steps.
_OTHER_BYTES = 1 << 23
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class WorkRates:
    """Median rates of local work over all ranks.

    Attributes:
        rates: bytes, operations or ids per second, keyed by name of ``WORKS``.
        lookup: costs in section ``costs.lookup`` of a topology file.
        gemm: costs in section ``costs.gemm`` of a topology file.
        timed: measured seconds, to which these costs are fitted.
    """

    rates: Mapping[str, float]
    lookup: Mapping[str, float]
    gemm: Mapping[str, float]
    timed: Mapping[Timed, float]


def measure_work(device: torch.device, effort: Effort, say: Callable[[str], None]) -> WorkRates:
    """Time all kinds of local work on all ranks at the same time. Collective call."""
    works, products = works_of(device), PRODUCTS[device.type]
    fitted_to: tuple[Timed, ...] = (*LOOKUPS, *products)
    named = {WORKS[name]: run for name, (_, run) in works.items()}
    runs = named | {str(each): each.on(device) for each in fitted_to}
    turns: dict[str, list[Sequence[float]]] = {words: [] for words in runs}
    for turn in range(_TURNS):  # so that a short slowdown affects only one turn
        for words, run in runs.items():
            if not turn:
                say(words)
                _rounds(run, device, _GROWING_SECONDS)
            turns[words].append(of_all_ranks(run, device, effort.seconds / _TURNS))
    found = {words: float(np.median(seconds)) for words, seconds in turns.items()}
    rates = {name: amount / found[WORKS[name]] for name, (amount, _) in works.items()}
    timed = {each: found[str(each)] for each in fitted_to}
    (flops,) = products[0].work
    rates["matmul"] = flops / timed[products[0]]

    def fitted(names: Sequence[str], to: Sequence[Timed]) -> dict[str, float]:
        work, measured = ([each.work for each in to], [timed[each] for each in to])
        found = fit_costs(np.array(work), np.array(measured), least=_LEAST_SECONDS)
        return dict(zip(names, found.tolist(), strict=True))

    by_lookup = ("lookups", "bytes_looked_up", "ids_looked_up", "rows_updated")
    return WorkRates(rates, fitted(by_lookup, LOOKUPS), fitted(("matmul_flops",), products), timed)


def fit_costs(
    work: NDArray[np.float64], measured: NDArray[np.float64], *, least: float
) -> NDArray[np.float64]:
    """Fit non-negative costs to measured times by least squares of relative errors.

    Args:
        work: ``[measurements, costs]``, amounts of work; ``work @ costs`` is the fitted time.
        measured: ``[measurements]``, times in seconds.
        least: lower limit for the denominator of a relative error.

    Returns:
        ``[costs]``; of equally good solutions the one with fewest non-zero costs.
    """
    weights = 1 / np.maximum(measured, least)
    scaled, target = work * weights[:, None], measured * weights
    units = np.abs(scaled).max(axis=0)
    columns = [column for column in range(work.shape[1]) if units[column]]
    best, least_error = np.zeros(work.shape[1]), float(np.square(target).sum())
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            part = list(chosen)
            solution, *_ = np.linalg.lstsq(scaled[:, part] / units[part], target, rcond=1e-6)
            error = float(np.square(scaled[:, part] / units[part] @ solution - target).sum())
            if solution.min() >= 0 and error < least_error * (1 - 1e-6):
                least_error = error
                best = np.zeros(work.shape[1])
                best[part] = solution / units[part]
    return best


def of_all_ranks(run: Callable[[], object], device: torch.device, least: float) -> list[float]:
    """Return each rank's mean seconds per ``run()`` while all ranks are busy. Collective call."""
    dist.barrier()
    mean = fmean(_rounds(run, device, least))
    # Continue until all are done, so that no rank gets a core to itself.
    others = dist.barrier(async_op=True)
    assert others is not None
    while not others.is_completed():
        run()
        wait_for(device)
    others.wait()
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, mean)
    return everyone


def _rounds(run: Callable[[], object], device: torch.device, least: float) -> list[float]:
    """Call ``run`` for ``least`` seconds or ``_MOST_ROUNDS`` times. Return each call's seconds."""
    seconds: list[float] = []
    others = torch.zeros(_OTHER_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
    while len(seconds) < LEAST_ROUNDS or (len(seconds) < _MOST_ROUNDS and sum(seconds) < least):
        others.add_(1)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds

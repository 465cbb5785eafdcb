"""What ranks do by themselves, all of a node at once, as they share its cores and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from recd_plugin_calibration.cluster.timing import LEAST_ROUNDS, Effort, MiddleHalf, wait_for
from recd_plugins.api.distributed import unique_ids
from recd_plugins.api.planning import fit_costs

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
# Of a matrix product: rows and columns on a processor and on a GPU.
_MATRIX = {"cpu": 512, "cuda": 4096}
# Of attention: rows, heads, positions, columns.
_ATTENTION = ((16, 2, 64, 32), (64, 2, 64, 8), (64, 2, 16, 8))
# Ids that are made unique, of so many distinct ones.
_IDS, _DISTINCT_IDS = 1 << 16, 1 << 13
_OPERATORS = 100
_SCALAR_BYTES = 4
_LEAST_SECONDS = 1e-6
# Of rounds that do not count: the heap grows in them, page by page, to what a round takes.
_GROWING_SECONDS = 0.04


@dataclass(frozen=True)
class Lookup:
    """Lookups of tables in one call.

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

    @property
    def work(self) -> tuple[float, ...]:
        """Calls, bytes, ids, rows that learn, and tables."""
        touched = self.rows * (1 - (1 - 1 / self.rows) ** (self.ids / self.tables))
        num_bytes = self.ids * self.dim * _SCALAR_BYTES
        return 1.0, num_bytes, self.ids, self.tables * touched, self.tables


# Of more rows than caches of a processor hold, which are read once or twice; and of few, whose ids
# repeat: what an id costs beside what a row does.
_LOOKUPS = (
    Lookup(1 << 11, 16, 1 << 20),
    Lookup(1 << 14, 16, 1 << 20),
    Lookup(1 << 11, 128, 1 << 17),
    Lookup(1 << 14, 128, 1 << 17),
    Lookup(1 << 16, 16, 1 << 8),
    Lookup(1 << 14, 128, 1 << 8),
    Lookup(1 << 11, 16, 1 << 16, tables=16),
)


@dataclass(frozen=True)
class WorkRates:
    """What a rank does, over all ranks.

    Attributes:
        rates: bytes, operations or ids a second by name of ``WORKS``; of GPUs on CUDA alone.
        lookup: what embeddings by FBGEMM cost, forward and backward with row-wise Adagrad, as
            the section ``costs.lookup`` of a topology has it.
        lookups: seconds of each that it was fitted to.
        attention: what torch's fused attention costs, forward and backward, of ``costs.gemm``.
        attentions: seconds of each that it was fitted to, by rows, heads, positions and columns.
    """

    rates: Mapping[str, MiddleHalf]
    lookup: Mapping[str, float]
    lookups: Mapping[Lookup, MiddleHalf]
    attention: Mapping[str, float]
    attentions: Mapping[tuple[int, int, int, int], MiddleHalf]


def measure_work(device: torch.device, effort: Effort, say: Callable[[str], None]) -> WorkRates:
    """Collective; each rank is timed by itself, while the others do the same."""
    rates: dict[str, MiddleHalf] = {}
    for name, (amount, run) in _works(device).items():
        say(WORKS[name])
        seconds = of_all_ranks(run, device, effort)
        rates[name] = MiddleHalf.of([amount / each for each in seconds])
    lookups = {}
    for lookup in _LOOKUPS:
        say(f"lookups of {lookup.ids:,} ids in {lookup.tables} table(s) of {lookup.dim} columns")
        lookups[lookup] = MiddleHalf.of(of_all_ranks(_run(lookup, device), device, effort))
    names = ("steps", "bytes_looked_up", "ids_looked_up", "rows_updated", "tables_looked_up")
    cost = _fitted(names, {each.work: spread.median for each, spread in lookups.items()})
    say("attention")
    attentions = {
        shape: MiddleHalf.of(of_all_ranks(_attention(shape, device), device, effort))
        for shape in _ATTENTION
    }
    # Two products forward and five backward, as torch counts them.
    work = {
        (14.0 * rows * heads * length * length * dim, float(rows * heads * length)): spread.median
        for (rows, heads, length, dim), spread in attentions.items()
    }
    attention = _fitted(("attention_flops", "attention_queries"), work)
    return WorkRates(rates, cost, lookups, attention, attentions)


def _fitted(names: Sequence[str], seconds: Mapping[Any, float]) -> dict[str, float]:
    """The cost of each of what the work of something has, by name."""
    work, measured = np.array(list(seconds)), np.array(list(seconds.values()))
    found = fit_costs(work, measured, least=_LEAST_SECONDS)
    return dict(zip(names, found.tolist(), strict=True))


def _works(device: torch.device) -> dict[str, tuple[float, Callable[[], object]]]:
    """What is done, and how much that is."""
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
    size = _MATRIX[device.type]
    # None is drawn: a run whose start this is goes on with the generators as they are.
    x, weight = (torch.ones(size, size, device=device, requires_grad=True) for _ in range(2))
    ones = torch.ones(size, size, device=device)
    found["matmul"] = 6.0 * size**3, lambda: torch.autograd.grad(x @ weight, (x, weight), ones)
    ids = torch.randint(_DISTINCT_IDS, (_IDS,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    found["unique"] = float(_IDS), lambda: unique_ids(ids, [_IDS])
    return found


def _attention(shape: Sequence[int], device: torch.device) -> Callable[[], object]:
    query, key, value = (torch.ones(*shape, device=device, requires_grad=True) for _ in range(3))

    def run() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return torch.autograd.grad(out.sum(), (query, key, value))

    return run


def _run(lookup: Lookup, device: torch.device) -> Callable[[], object]:
    on_cuda = device.type == "cuda"
    where = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    kernel: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(lookup.rows, lookup.dim, where, compute)] * lookup.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        device=device,
    )
    rows = torch.randint(lookup.rows, (lookup.ids,), generator=torch.Generator().manual_seed(0))
    # Bags of one id, as those of sequences are.
    rows, offsets = rows.to(device), torch.arange(lookup.ids + 1, device=device)
    bags = lookup.ids // lookup.tables
    gradient = torch.ones(bags, lookup.tables * lookup.dim, device=device)
    return lambda: kernel(rows, offsets).backward(gradient)


def of_all_ranks(run: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Seconds of each rank, the mean: ranks that share cores wait for one now and then."""
    _rounds(run, device, _GROWING_SECONDS)
    dist.barrier()
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, fmean(_rounds(run, device, effort.seconds / 2)))
    return everyone


def _rounds(run: Callable[[], object], device: torch.device, least: float) -> list[float]:
    """Seconds of each, ``least`` of all together."""
    seconds: list[float] = []
    while len(seconds) < LEAST_ROUNDS or sum(seconds) < least:
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds

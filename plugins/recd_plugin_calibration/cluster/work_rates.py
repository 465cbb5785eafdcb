"""What ranks do by themselves, all of a node at once, as they share its cores and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
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

from recd_plugin_calibration.cluster.timing import Effort, MiddleHalf, wait_for
from recd_plugins.api.distributed import unique_ids
from recd_plugins.api.planning import fit_costs

#: What a rank does by itself, in words.
WORKS = {
    "copy": "copies in memory",
    "device_copy": "copies in a GPU's memory",
    "to_device": "copies to a GPU",
    "elements": "small operations, bytes read or written",
    "matmul": "matrix products",
    "attention": "attention",
    "unique": "making ids unique",
}

# More than caches of a processor hold, and what an operation of a step reads.
_COPIED_BYTES, _ELEMENT_BYTES = 1 << 26, 1 << 22
# Of a matrix product: rows and columns on a processor and on a GPU.
_MATRIX = {"cpu": 512, "cuda": 4096}
# Of attention: rows, heads, positions, columns.
_ATTENTION = (16, 2, 64, 32)
# Ids that are made unique, of so many distinct ones.
_IDS, _DISTINCT_IDS = 1 << 16, 1 << 13
# Lookups of a table: ids, ids of a bag, and columns.
_TABLE_ROWS = 1 << 17
_LOOKUPS = ((1 << 11, 16), (1 << 14, 16), (1 << 11, 128), (1 << 14, 128))
_BAG = 8
_SCALAR_BYTES = 4
_LEAST_SECONDS = 1e-6


@dataclass(frozen=True)
class WorkRates:
    """What a rank does, over all ranks.

    Attributes:
        rates: bytes, operations or ids a second by name of ``WORKS``; of GPUs on CUDA alone.
        lookup: what embeddings by FBGEMM cost, forward and backward with row-wise Adagrad, as
            the section ``costs.lookup`` of a topology has it.
        lookups: seconds of each that it was fitted to, by ids and columns.
    """

    rates: Mapping[str, MiddleHalf]
    lookup: Mapping[str, float]
    lookups: Mapping[tuple[int, int], MiddleHalf]


def measure_work(device: torch.device, effort: Effort, say: Callable[[str], None]) -> WorkRates:
    """Collective; each rank is timed by itself, while the others do the same."""
    rates: dict[str, MiddleHalf] = {}
    for name, (amount, run) in _works(device).items():
        say(WORKS[name])
        seconds = _of_all_ranks(run, device, effort)
        rates[name] = MiddleHalf.of([amount / each for each in seconds])
    lookups = {}
    for ids, dim in _LOOKUPS:
        say(f"lookups of {ids:,} ids in a table of {dim} columns")
        lookups[ids, dim] = MiddleHalf.of(_of_all_ranks(_lookup(ids, dim, device), device, effort))
    work = np.array([[1.0, ids * dim * _SCALAR_BYTES, ids] for ids, dim in lookups])
    found = fit_costs(
        work, np.array([each.median for each in lookups.values()]), least=_LEAST_SECONDS
    )
    steps, num_bytes, ids_cost = found.tolist()
    cost = {"steps": steps, "bytes_looked_up": num_bytes, "ids_looked_up": ids_cost}
    return WorkRates(rates, cost, lookups)


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
    elements = torch.ones(_ELEMENT_BYTES // _SCALAR_BYTES, device=device)
    # Of the sum two are read and one is written, of the others one each.
    found["elements"] = 7.0 * _ELEMENT_BYTES, lambda: (elements + elements).relu() * 0.5
    size = _MATRIX[device.type]
    # None is drawn: a run whose start this is goes on with the generators as they are.
    x, weight = (torch.ones(size, size, device=device, requires_grad=True) for _ in range(2))
    ones = torch.ones(size, size, device=device)
    found["matmul"] = 6.0 * size**3, lambda: torch.autograd.grad(x @ weight, (x, weight), ones)
    query, key, value = (
        torch.ones(_ATTENTION, device=device, requires_grad=True) for _ in range(3)
    )

    def attention() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return torch.autograd.grad(out.sum(), (query, key, value))

    # Two products forward and five backward, as torch counts them.
    rows, heads, length, dim = _ATTENTION
    found["attention"] = 14.0 * rows * heads * length * length * dim, attention
    ids = torch.randint(_DISTINCT_IDS, (_IDS,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    found["unique"] = float(_IDS), lambda: unique_ids(ids, [_IDS])
    return found


def _lookup(ids: int, dim: int, device: torch.device) -> Callable[[], object]:
    on_cuda = device.type == "cuda"
    where = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
    kernel: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(_TABLE_ROWS, dim, where, ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        device=device,
    )
    rows = torch.randint(_TABLE_ROWS, (ids,), generator=torch.Generator().manual_seed(0))
    rows, offsets = rows.to(device), torch.arange(0, ids + 1, _BAG, device=device)
    gradient = torch.ones(ids // _BAG, dim, device=device)
    return lambda: kernel(rows, offsets).backward(gradient)


def _of_all_ranks(run: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Median seconds of each rank."""
    for _ in range(2):
        run()
    wait_for(device)
    dist.barrier()
    seconds: list[float] = []
    while len(seconds) < effort.rounds or sum(seconds) < effort.seconds / 2:
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, median(seconds))
    return everyone

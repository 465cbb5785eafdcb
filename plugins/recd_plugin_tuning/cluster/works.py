"""What ranks do by themselves in a step, and how much of it: what is timed on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from recd_plugins.api import unique_ids, use_row_wise_adagrad

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


@dataclass(frozen=True)
class Attention:
    """torch's fused attention, ``[rows, heads, length, dim]``, and back."""

    rows: int
    heads: int
    length: int
    dim: int

    def __str__(self) -> str:
        positions = f"{self.heads} x {self.length} positions"
        return f"attention of {self.rows} rows, {positions}, dim {self.dim}, and back"

    @property
    def work(self) -> tuple[float]:
        """Operations, of two products forward and five backward as torch counts."""
        return (14.0 * self.rows * self.heads * self.length * self.length * self.dim,)

    def on(self, device: torch.device) -> Callable[[], object]:
        """What does it once, on tensors that are there."""
        leaf = partial(torch.ones, device=device, requires_grad=True)
        query, key, value = (leaf(*astuple(self)) for _ in range(3))

        def run() -> object:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            return torch.autograd.grad(out.sum(), (query, key, value))

        return run


#: What costs are fitted to.
Timed = Lookup | Product | Attention

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
ATTENTIONS = (Attention(16, 2, 64, 32), Attention(64, 2, 64, 8))


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

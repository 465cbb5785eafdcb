"""Tracks the table rows that training changes, for delta checkpoints and publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.runtime.errors import SetupError

#: Function (table name, row numbers of the table, int64) that records changed rows.
Mark = Callable[[str, Tensor], None]

_ALL = 255
_MOST_CONSUMERS = 8
# Updates that change only rows with a gradient.
_OPTIMIZERS = {
    *(EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    *(EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM),
    *(EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB, EmbOptimType.LARS_SGD),
}
_WEIGHT_DECAYS = {WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE}


@dataclass(frozen=True)
class _Shard:
    """Marks of a local table shard: uint8 ``[num_rows + 1]``, with one bit per consumer.

    The last element is for ids outside of the table. FBGEMM's bounds check replaces them by row 0.
    """

    first_row: int
    bits: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.bits) - 1

    def mark(self, rows: Tensor) -> None:
        """Set all bits of local rows, int32 or int64 ``[n]``."""
        self.bits.index_fill_(0, rows.clamp(0, self.num_rows).long(), _ALL)

    def take(self, bit: int) -> Tensor:
        """Return the table rows with mask ``bit`` set, int64 ``[n]`` on the CPU, and clear it."""
        self.bits[0].bitwise_or_(self.bits[-1])
        rows = (self.bits[:-1] & bit).nonzero().squeeze(1).cpu()
        self.bits.bitwise_and_(_ALL - bit)
        return rows + self.first_row


@dataclass
class ChangedRows:
    """Tracks the rows of this rank's table shards that training has changed.

    A row is marked when its gradient arrives in the backward pass, so lookups of an evaluation do
    not count. Loading a state dict marks all rows of a module. Each consumer reads and clears its
    own marks. Nothing is tracked before the first consumer is registered.

    TorchRec's fused kernels and their subclasses are tracked, if their optimizer and weight decay
    change only rows with a gradient. All other tables, such as data-parallel ones, are not in
    ``tables``, so consumers must read all their rows.

    If a sharded module or kernel changes rows without a lookup, it defines a method
    ``track_changed_rows(mark)``, which stores ``mark``. The module calls it with a table's name
    and row numbers after each such change. Rows of other ranks are ignored.

    Attributes:
        consumers: dict from a consumer's name to its bit in the marks of each row.
    """

    consumers: dict[str, int] = field(default_factory=dict)
    _shards: dict[str, list[_Shard]] = field(default_factory=dict)

    @classmethod
    def of(cls, dmp: DistributedModelParallel, consumer: str) -> ChangedRows:
        """Register a consumer, for which no row has changed yet, and return the model's tracker.

        Register before the first batch, because earlier lookups are not tracked. A consumer that is
        already registered loses its marks.

        Raises:
            SetupError: the model already has 8 consumers.
        """
        tracker = _TRACKERS.setdefault(dmp.module, cls())
        if not tracker.consumers:
            tracker._watch(dmp.module)
        if consumer not in tracker.consumers:
            if len(tracker.consumers) == _MOST_CONSUMERS:
                raise SetupError(
                    f"changed rows are already tracked for {_MOST_CONSUMERS} consumers: "
                    f"{', '.join(tracker.consumers)}. Use one of them."
                )
            tracker.consumers[consumer] = 1 << len(tracker.consumers)
        tracker.take(consumer)
        return tracker

    @property
    def tables(self) -> frozenset[str]:
        """Return the state dict keys of tracked weights that have rows on this rank."""
        return frozenset(self._shards)

    def take(self, consumer: str) -> dict[str, Tensor]:
        """Return the rows changed since the consumer's last call, and clear its marks.

        Call ``dmp.state_dict()`` on all ranks first. It writes copies of rows on other ranks to
        their table.

        Returns:
            A dict from the name of each tracked table weight in the state dict to row numbers of
            the table, ascending int64 on the CPU.
        """
        bit = self.consumers[consumer]
        return {
            name: torch.unique(torch.cat([shard.take(bit) for shard in shards]))
            for name, shards in self._shards.items()
        }

    def _watch(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if not (lookups := getattr(module, "_lookups", ())):
                continue
            shards: dict[str, list[_Shard]] = {}
            kernels = [each for lookup in lookups for each in lookup.modules()]
            for kernel in kernels:
                if _changes_looked_up_rows_only(kernel):
                    of_kernel = list(_shards_of(kernel))
                    bits = [shard for _, shard in of_kernel]
                    kernel.register_forward_hook(partial(_mark_in_backward, bits))
                    for name, shard in of_kernel:
                        shards.setdefault(name, []).append(shard)
            mark = partial(_mark_rows, shards)
            for each in (module, *kernels):
                if hasattr(each, "track_changed_rows"):
                    each.track_changed_rows(mark)
            module.register_load_state_dict_post_hook(partial(_mark_all, shards))
            tables = "embeddings" if hasattr(module, "embeddings") else "embedding_bags"
            for name, found in shards.items():
                self._shards[".".join(filter(None, (path, tables, name, "weight")))] = found


_TRACKERS: WeakKeyDictionary[nn.Module, ChangedRows] = WeakKeyDictionary()


def _changes_looked_up_rows_only(kernel: nn.Module) -> bool:
    if not isinstance(kernel, BatchedFusedEmbedding | BatchedFusedEmbeddingBag):
        return False
    tables: Any = kernel.emb_module
    return tables.optimizer in _OPTIMIZERS and tables.weight_decay_mode in _WEIGHT_DECAYS


def _shards_of(kernel: Any) -> Iterator[tuple[str, _Shard]]:
    """Yield the name and the bits of each table of a kernel, as views of one tensor."""
    tables = kernel.config.embedding_tables
    sizes = [table.local_rows + 1 for table in tables]
    bits = torch.zeros(
        sum(sizes), dtype=torch.uint8, device=kernel.emb_module.weights_offsets.device
    )
    for table, part in zip(tables, torch.split(bits, sizes), strict=True):
        first = 0 if table.local_metadata is None else table.local_metadata.shard_offsets[0]
        yield table.name, _Shard(first, part)


def _mark_in_backward(
    shards: list[_Shard], kernel: Any, inputs: tuple[Any, ...], output: Tensor
) -> None:
    """Mark the looked-up rows when the gradient of a lookup's output arrives."""
    if not output.requires_grad or output.is_leaf:  # a leaf: the kernel has no rows on this rank
        return
    ids, sizes = inputs[0].values(), inputs[0].length_per_key()
    of_features = [shards[table] for table in kernel._feature_table_map]

    def mark(_: Tensor) -> None:
        if ids.is_cuda:
            for shard, rows in zip(of_features, torch.split(ids, sizes), strict=True):
                shard.mark(rows)
        else:
            layout = [(s.bits.storage_offset(), s.num_rows) for s in of_features]
            bits = of_features[0].bits
            every = bits.as_strided((bits.untyped_storage().nbytes(),), (1,), 0)
            _set_bits(every.numpy(), ids.numpy(), np.array(sizes), np.array(layout))

    output.register_hook(mark)  # type: ignore[no-untyped-call]


@numba.njit(cache=True, nogil=True)
def _set_bits(bits: Any, ids: Any, sizes: Any, layout: Any) -> None:
    """Set all bits of looked-up rows, given (first element, number of rows) of each feature."""
    start = 0
    for feature in range(len(sizes)):
        first, num_rows = layout[feature]
        end = start + sizes[feature]
        for index in range(start, end):
            row = ids[index]
            bits[first + (row if 0 <= row < num_rows else num_rows)] = 255
        start = end


def _mark_rows(shards: dict[str, list[_Shard]], table: str, rows: Tensor) -> None:
    """Mark rows of a table, int64 row numbers of the whole table, that are in a local shard."""
    for shard in shards.get(table, ()):
        local = rows.to(shard.bits.device) - shard.first_row
        shard.mark(local[(local >= 0) & (local < shard.num_rows)])


def _mark_all(shards: dict[str, list[_Shard]], *_: object) -> None:
    for of_table in shards.values():
        for shard in of_table:
            shard.bits.fill_(_ALL)

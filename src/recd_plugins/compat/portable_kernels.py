"""CPU lookups for cases where those of TorchRec and FBGEMM (1.6 to 1.9) fail or are slow.

If all tables of a kernel have the same width, their rows are in one block of memory. They can then
be looked up as a single table, with any number of bags and without padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.runtime.errors import DataError

# FBGEMM's bag kernel indexes the rows of a table with 32 bits.
_MOST_ROWS = 2**31 - 2


class PortableDenseEmbedding(BatchedDenseEmbedding):
    """TorchRec's dense kernel without pooling, based on ``torch.nn.functional.embedding``.

    FBGEMM's dense kernel (1.6 to 1.9) ignores ``PoolingMode.NONE`` on CPU and sums the embeddings
    of each row. Parameters and state dict do not change.
    """

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return one embedding per id, ``[num_values, embedding_dim]``, in the order of the ids.

        Raises DataError if an id is outside of its table.
        """
        _refuse_outside(self, features)
        device = features.values().device
        first_row = torch.tensor([0, *self._local_rows[:-1]], device=device).cumsum(0)
        table_of_feature = torch.tensor(self._feature_table_map, device=device)
        ids_per_feature = torch.tensor(features.length_per_key(), device=device)
        rows = features.values().long() + first_row[table_of_feature].repeat_interleave(
            ids_per_feature
        )
        return F.embedding(rows, self._emb_module.weights.view(-1, self._local_cols[0]))


class PortableDenseEmbeddingBag(BatchedDenseEmbeddingBag):
    """TorchRec's dense pooled kernel, with support for variable batches (VBE) on CPU."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return pooled embeddings ``[B, columns]``; for variable batches flat, ordered by rank."""
        if not features.variable_stride_per_key():
            return super().forward(features)
        widths, strides = _widths_and_strides(self, features)
        return _unpadded(super().forward(_padded(features, strides.sum(1))), widths, strides)


class PortablePooledLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's pooled lookup, with support for variable batches (VBE) of several kernels on CPU.

    In TorchRec (1.6 to 1.9) all kernels write to one shared output, which FBGEMM supports only on
    CUDA. This lookup concatenates the outputs of the kernels, as TorchRec does on MTIA.
    """

    def _forward_with_vbe_merging(
        self,
        features_by_group: list[KeyedJaggedTensor],
        device: torch.device,  # noqa: ARG002
    ) -> Tensor:
        parts = []
        for config, features, output in zip(
            self.grouped_configs, features_by_group, self._forward(features_by_group), strict=True
        ):
            by_rank = zip(*features.stride_per_key_per_rank(), strict=True)
            widths = config.embedding_dims()
            sizes = [[n * w for n, w in zip(rows, widths, strict=True)] for rows in by_rank]
            of_kernel = iter(output.split([size for of_rank in sizes for size in of_rank]))
            parts.append([[next(of_kernel) for _ in of_rank] for of_rank in sizes])
        return torch.cat(
            [part for of_rank in zip(*parts, strict=True) for some in of_rank for part in some]
        )


class PortableEmbeddingBag(BatchedFusedEmbeddingBag):
    """TorchRec's fused pooled kernel, with a faster lookup of variable batches (VBE) on CPU.

    FBGEMM (1.8) runs several operations per row to compute metadata, and pads all features to the
    longest one. This kernel looks up tables of equal width as one table, and otherwise pads the
    offsets itself. Values and gradients are the same.
    """

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Return pooled embeddings ``[B, columns]``; for variable batches flat, ordered by rank."""
        if not features.variable_stride_per_key():
            return super().forward(features, vbe_output, vbe_output_offsets)
        widths, strides = _widths_and_strides(self, features)
        if fits_one_table(self._emb_module):
            weights = features.weights_or_none()
            if weights is not None and not weights.is_floating_point():
                weights = None  # as in the base class
            output = look_up_bags(self._emb_module, features, features.offsets(), weights)
            parts, num_ranks = torch.split(output, strides.flatten().tolist()), strides.shape[1]
            by_rank = [part for rank in range(num_ranks) for part in parts[rank::num_ranks]]
            return torch.cat(by_rank).flatten()
        return _unpadded(super().forward(_padded(features, strides.sum(1))), widths, strides)


class PortableEmbedding(BatchedFusedEmbedding):
    """TorchRec's fused kernel without pooling, which looks up each id as a bag with one id.

    FBGEMM's backward pass on CPU (1.6 to 1.9) is 24 to 32 times slower without bags. Values and
    gradients are the same.
    """

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return one embedding per id, ``[num_values, embedding_dim]``, in the order of the ids."""
        offsets = torch.arange(len(features.values()) + 1)
        return look_up_bags(self._emb_module, features, offsets)


def _refuse_outside(kernel: Any, features: KeyedJaggedTensor) -> None:
    tables = kernel._feature_table_map
    refuse_outside(
        features.values(),
        features,
        [kernel._local_rows[table] for table in tables],
        lambda number: kernel._config.embedding_tables[tables[number]].name,
    )


def _widths_and_strides(kernel: Any, features: KeyedJaggedTensor) -> tuple[list[int], Tensor]:
    widths = [kernel._local_cols[table] for table in kernel._feature_table_map]
    return widths, torch.tensor(features.stride_per_key_per_rank()).view(len(widths), -1)


def _padded(features: KeyedJaggedTensor, num_rows: Tensor) -> KeyedJaggedTensor:
    """Pad the F features of a KJT with a variable batch size per feature to the largest row count.

    ``num_rows``: int64 ``[F]``, current number of rows of each feature.
    """
    stride = max(1, int(num_rows.max()))
    first_row = num_rows.cumsum(0) - num_rows
    rows = torch.minimum(torch.arange(stride), num_rows.unsqueeze(1)) + first_row.unsqueeze(1)
    offsets = features.offsets()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        offsets=torch.cat([offsets.index_select(0, rows.flatten()), offsets[-1:]]),
        stride=stride,
    )


def _unpadded(output: Tensor, widths: list[int], strides: Tensor) -> Tensor:
    """Remove the rows that ``_padded`` added from a pooled output. Return it flat, rank by rank."""
    parts = [
        torch.split(rows, [*of_ranks, len(rows) - sum(of_ranks)])
        for rows, of_ranks in zip(torch.split(output, widths, 1), strides.tolist(), strict=True)
    ]
    return torch.cat([each[rank].flatten() for rank in range(strides.shape[1]) for each in parts])


class EmptyEmbeddingBag(BatchedFusedEmbeddingBag):
    """TorchRec's fused pooled kernel for tables that have no rows on this rank.

    Small row-wise tables may have no rows on some ranks. FBGEMM (1.6 to 1.9) fails for such
    kernels on CPU.
    """

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return zeros. Raises DataError if the batch contains an id."""
        _refuse_outside(self, features)
        widths = [self._local_cols[table] for table in self._feature_table_map]
        if features.variable_stride_per_key():
            strides = zip(features.stride_per_key(), widths, strict=True)
            shape = [sum(stride * width for stride, width in strides)]
        else:
            shape = [features.stride(), sum(widths)]
        zeros = _zeros(self, features, shape)
        # Weights of a feature processor need a gradient here too, since other ranks all-reduce it.
        weights = features.weights_or_none()
        return zeros if weights is None else zeros + weights.sum() * 0


class EmptyEmbedding(BatchedFusedEmbedding):
    """TorchRec's fused kernel without pooling for tables that have no rows on this rank."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return an empty ``[0, embedding_dim]``. Raises DataError if the batch contains an id."""
        _refuse_outside(self, features)
        return _zeros(self, features, [0, self._local_cols[0]])


def _zeros(kernel: Any, features: KeyedJaggedTensor, shape: list[int]) -> Tensor:
    dtype = SparseType.from_int(kernel._emb_module.output_dtype).as_dtype()
    return torch.zeros(shape, dtype=dtype, device=features.device(), requires_grad=True)


_EMPTY: dict[type[nn.Module], type[nn.Module]] = {
    BatchedFusedEmbeddingBag: EmptyEmbeddingBag,
    BatchedFusedEmbedding: EmptyEmbedding,
}


def _part_tables(kernel: Any) -> None:
    """Give each table of an FBGEMM kernel a distinct first row, even tables without local rows.

    FBGEMM's CPU kernels identify tables by their first row. They confuse a table without rows with
    the next table, and overwrite other memory if the widths differ.
    """
    if 0 in kernel._local_rows:
        begins = [0, *accumulate(max(1, rows) for rows in kernel._local_rows)]
        tables = kernel.emb_module
        tables.hash_size_cumsum = tables.hash_size_cumsum.new_tensor(
            [*(begins[table] for table in kernel._feature_table_map), begins[-1]]
        )


def use_portable_lookups(lookups: Iterable[nn.Module]) -> None:
    """Replace TorchRec's lookups and kernels with the classes of this module, in place.

    Only ``__class__`` changes, since optimizers, DDP and state dicts refer to the parameters.
    """
    module: Any
    for module in (module for lookup in lookups for module in lookup.modules()):
        if type(module) is GroupedPooledEmbeddingsLookup:
            module.__class__ = PortablePooledLookup
        elif type(module) is BatchedDenseEmbedding:
            module.__class__ = PortableDenseEmbedding
        elif type(module) is BatchedDenseEmbeddingBag:
            _part_tables(module)
            module.__class__ = PortableDenseEmbeddingBag
        elif type(module) in _EMPTY:
            _part_tables(module)
            if sum(module._local_rows) == 0:
                module.__class__ = _EMPTY[type(module)]
                continue
            if type(module) is BatchedFusedEmbeddingBag:
                module.__class__ = PortableEmbeddingBag
            elif fits_one_table(module.emb_module):
                module.__class__ = PortableEmbedding


def fits_one_table(kernel: Any) -> bool:
    """Return whether ``look_up_bags`` supports the FBGEMM kernel: CPU, tables of equal width."""
    return kernel.use_cpu and len(set(kernel.dims)) == 1 and kernel.total_hash_size <= _MOST_ROWS


def look_up_bags(
    kernel: Any, features: KeyedJaggedTensor, offsets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Look up bags of ids with an FBGEMM kernel, as if its tables were a single table.

    ``kernel`` is a kernel for which ``fits_one_table`` is True. Bags are summed if it has no
    pooling. A bag may only contain ids of one feature, and ``offsets`` are ``[num_bags + 1]``.

    Returns:
        ``[num_bags, embedding_dim]``.

    Raises:
        DataError: an id is outside of its table, unless FBGEMM's bounds check replaces such ids.
    """
    # Check the bounds of each table, with one bag per feature.
    ids, _, weights, _ = kernel.prepare_inputs(
        features.values().to(kernel.embedding_table_index_type),
        torch.tensor(features.offset_per_key()),
        weights,
    )
    refuse_outside(
        ids,
        features,
        kernel.rows_per_table.tolist(),
        lambda number: kernel.table_names[kernel.feature_table_map[number]],
    )
    if len(kernel.dims) > 1:
        first_rows = (kernel.weights_offsets // kernel.dims[0]).to(ids.dtype)
        ids_per_feature = torch.tensor(features.length_per_key())
        ids = first_rows.repeat_interleave(ids_per_feature, output_size=len(ids)).add_(ids)
    output: Tensor = _one_table(kernel)(ids, offsets, weights)
    return output


def refuse_outside(
    ids: Tensor, features: KeyedJaggedTensor, rows: Sequence[int], table: Callable[[int], str]
) -> None:
    """Raise DataError if an id is outside of its table; the kernel would read another table's row.

    ``rows`` is the number of local rows for each feature. ``table`` returns the table name for the
    index of a feature. FBGEMM's bounds check accepts -1, and accepts all ids if it is off.
    """
    if not len(ids):
        return
    least, most = ids.aminmax()
    if least >= 0 and most < min(rows):
        return
    of_features = torch.split(ids, features.length_per_key())
    for number, (feature, limit, own) in enumerate(
        zip(features.keys(), rows, of_features, strict=True)
    ):
        outside = own[(own < 0) | (own >= limit)]
        if len(outside):
            here = f"this rank has rows 0 to {limit - 1}" if limit else "this rank has no rows"
            raise DataError(
                f"table {table(number)!r}: feature {feature!r} has the id {int(outside[0])}, but "
                f"{here}. Fix the data, or increase the number of rows of the table."
            )


def _one_table(kernel: Any) -> Any:
    """Return a copy of an FBGEMM kernel that has a single table and shares its parameters."""
    one = copy.copy(kernel)
    one._buffers = {
        # Offsets of weights and optimizer state, per feature.
        name: buffer[:1] if name.endswith(("_offsets", "_placements")) else buffer
        for name, buffer in kernel._buffers.items()
    }
    width, num_rows = kernel.dims[0], kernel.total_hash_size
    one.total_D = width
    one.D_offsets = kernel.D_offsets.new_tensor([0, width])
    one.hash_size_cumsum = kernel.hash_size_cumsum.new_tensor([0, num_rows])
    one.rows_per_table = kernel.rows_per_table.new_tensor([num_rows])
    one.bounds_check_mode_int = BoundsCheckMode.NONE.value
    if kernel.is_nobag:
        one.pooling_mode, one.is_nobag = PoolingMode.SUM, False
    return one

"""FBGEMM's row-wise Adagrad on CPU with a backward pass of our own: the same bits, sooner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from recd_plugins.compat.row_wise_kernels import bags_by_row, learn_rows
from recd_plugins.sharding.coalesced.input_dist import unique_ids

# Rows that a further thread is worth its start for.
_ROWS_PER_THREAD = 16384


class RowWiseAdagrad(SplitTableBatchedEmbeddingBagsCodegen):
    """An FBGEMM kernel on CPU whose rows learn by compiled loops of ours.

    FBGEMM (1.6 to 1.9) generates code for this update that goes to and fro between AVX and SSE
    instructions six times a row. An Intel Xeon with AMX waits at each change: 0.46 us for a row of
    16 numbers, of which memory and arithmetic take 0.05. The order of all sums is FBGEMM's, so that
    weights and states are the same bit for bit.
    """

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *more: Any,
        **others: Any,
    ) -> Tensor:
        """As FBGEMM's, whose backward pass is taken, too, where rows are not pooled, weights of ids
        need a gradient, features share a table, or batches come with sizes by feature."""
        if (
            any(value is not None for value in (*more, *others.values()))
            or self.is_nobag
            or not torch.is_grad_enabled()
            or (per_sample_weights is not None and per_sample_weights.requires_grad)
            or not self.hash_size_cumsum.diff().all()  # a feature after another of its table
        ):
            return self.looked_up(indices, offsets, per_sample_weights, *more, **others)
        learned: Tensor = RowWiseAdagradLookupFunction.apply(  # type: ignore[no-untyped-call]
            self.placeholder_autograd_tensor, self, indices, offsets, per_sample_weights
        )
        return learned

    def looked_up(self, *arguments: Any, **options: Any) -> Tensor:
        """What FBGEMM's kernel gives."""
        output: Tensor = super().forward(*arguments, **options)
        return output


class RowWiseAdagradLookupFunction(torch.autograd.Function):
    """A lookup by FBGEMM; in the backward pass its rows learn."""

    @staticmethod
    def forward(
        ctx: Any,
        needs_gradient: Tensor,  # noqa: ARG004  so that the rows do, as FBGEMM's
        kernel: RowWiseAdagrad,
        indices: Tensor,
        offsets: Tensor,
        id_weights: Tensor | None,
    ) -> Tensor:
        rows = kernel.looked_up(indices, offsets, id_weights)
        # Saved as FBGEMM's are: whoever changes one before the backward pass is told.
        ctx.save_for_backward(
            kernel._indices,  # after its check of bounds
            kernel._offsets,
            id_weights,
            kernel.weights_host,
            kernel.momentum1_host,
            kernel.D_offsets,
            kernel.weights_offsets,
            kernel.momentum1_offsets,
        )
        ctx.means = kernel.pooling_mode == PoolingMode.MEAN and id_weights is None
        ctx.rate = float(kernel.learning_rate_tensor)
        ctx.eps = kernel.optimizer_args.eps
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, ...]:
        ids, offsets, id_weights, weights, momentum, columns, *starts = ctx.saved_tensors
        num_features = len(columns) - 1
        firsts = torch.arange(num_features + 1) * ((len(offsets) - 1) // num_features)
        unique, counts, places = unique_ids(ids, offsets.index_select(0, firsts).diff().tolist())
        of_features, ends = np.asarray(counts), np.empty(len(unique), np.int64)
        of_ids = np.empty(0, np.float32) if id_weights is None else id_weights.float().numpy()
        bags = np.empty(len(ids), np.int32)
        of = np.empty(len(ids) if ctx.means or len(of_ids) else 0, np.float32)
        bags_by_row(places.numpy(), of_features, offsets.numpy(), of_ids, ctx.means, ends, bags, of)
        arguments = (
            *(unique.numpy(), of_features, ends, bags, of),
            *(gradients.contiguous().numpy(), columns.numpy()),
            *(weights.data_ptr(), starts[0].numpy(), momentum.data_ptr(), starts[1].numpy()),
            *(np.float32(ctx.rate), np.float32(ctx.eps)),
        )
        parts = min(torch.get_num_threads(), 1 + len(unique) // _ROWS_PER_THREAD)
        if parts == 1:
            learn_rows(*arguments, 0, 1)
        else:
            with ThreadPoolExecutor(parts) as threads:
                list(threads.map(lambda part: learn_rows(*arguments, part, parts), range(parts)))
        return (None,) * 5


def _is_row_wise(kernel: Any) -> bool:
    return bool(kernel.use_cpu and kernel.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def use_row_wise_adagrad(kernel: Any) -> None:
    """Let an FBGEMM kernel of row-wise Adagrad on CPU learn by our loops, in place.

    A kernel with a weight decay, clipping or counters, or of other types than float32, stays as it
    is.
    """
    if type(kernel) is not SplitTableBatchedEmbeddingBagsCodegen or not _is_row_wise(kernel):
        return
    arguments = kernel.optimizer_args
    if (
        {kernel.weights_precision, SparseType.from_int(kernel.output_dtype)} == {SparseType.FP32}
        and not arguments.gradient_clipping
        and not arguments.weight_decay
        and not arguments.max_norm
        and not kernel._used_rowwise_adagrad_with_counter
        and not kernel._used_rowwise_adagrad_with_global_weight_decay
    ):
        kernel.__class__ = RowWiseAdagrad

"""Row-wise Adagrad on CPU by compiled loops."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.autograd.function import once_differentiable

from recd_plugins.sharding.coalesced.input_dist import unique_ids
from recd_plugins.sparse.overlap import float32_at, prefetch

f32 = np.float32
#: Scalars that FBGEMM squares side by side: a vector register of AVX2. The order of a sum is part
#: of its last bits.
_LANES = 8
#: Rows between the one that learns and the one that is fetched from memory meanwhile.
_AHEAD = 8


def _sum_of(lanes: int) -> Any:
    """Return an intrinsic that sums ``lanes`` scalars of gradients over bags in a register.

    Its arguments are addresses, but for the first and the last bag of a row and the bytes from one
    bag's gradients to the next; that of what a bag counts may be 0.
    """

    def sum_of(
        typing_context: Any,  # noqa: ARG001
        target: Any,  # noqa: ARG001
        gradients: Any,  # noqa: ARG001
        stride: Any,  # noqa: ARG001
        bags: Any,  # noqa: ARG001
        begin: Any,  # noqa: ARG001
        end: Any,  # noqa: ARG001
        of: Any,  # noqa: ARG001
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            target, gradients, stride, bags, begin, end, of = args
            scalar, number = ir.FloatType(), ir.IntType(32)
            vector = ir.VectorType(scalar, lanes)
            weighted = builder.icmp_unsigned("!=", of, of.type(0))

            def item(base: Any, index: Any, size: Any, kind: Any) -> Any:
                at = builder.add(base, builder.mul(builder.sext(index, base.type), size))
                return builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)

            # At the start of the function: of one in a loop the stack would hold each.
            total = cgutils.alloca_once(builder, vector)  # type: ignore[no-untyped-call]
            builder.store(ir.Constant(vector, [0.0] * lanes), total)
            with cgutils.for_range_slice(builder, begin, end, begin.type(1)) as (occurrence, _):
                bag = item(bags, occurrence, occurrence.type(4), number)
                gradient, summed = item(gradients, bag, stride, vector), builder.load(total)
                with builder.if_else(weighted) as (then, otherwise):
                    with then:
                        weight = item(of, occurrence, occurrence.type(4), scalar)
                        weights = ir.Constant(vector, ir.Undefined)
                        for lane in range(lanes):
                            weights = builder.insert_element(weights, weight, number(lane))
                        rounded_once = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                            builder.module,
                            ir.FunctionType(vector, [vector] * 3),
                            f"llvm.fma.v{lanes}f32",
                        )
                        builder.store(
                            builder.call(rounded_once, [weights, gradient, summed]), total
                        )
                    with otherwise:
                        builder.store(builder.fadd(summed, gradient), total)
            place = builder.inttoptr(target, vector.as_pointer())
            builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return intrinsic(sum_of)


_sum_of_32, _sum_of_8, _sum_of_4 = _sum_of(32), _sum_of(8), _sum_of(4)


@numba.njit(inline="always")
def _sum_row(
    target: Any, gradients: Any, width: Any, stride: Any, bags: Any, begin: Any, end: Any, of: Any
) -> None:
    """Sum a row of ``width`` scalars, a multiple of 4."""
    start = 0
    while start + 32 <= width:
        _sum_of_32(target + start * 4, gradients + start * 4, stride, bags, begin, end, of)
        start += 32
    while start + 8 <= width:
        _sum_of_8(target + start * 4, gradients + start * 4, stride, bags, begin, end, of)
        start += 8
    if start < width:
        _sum_of_4(target + start * 4, gradients + start * 4, stride, bags, begin, end, of)


@numba.njit(cache=True, nogil=True)
def bags_by_row(
    places: Any, counts: Any, offsets: Any, weights: Any, mean: Any, ends: Any, bags: Any, of: Any
) -> None:
    """Find the bags of each row.

    Args:
        places: int64 ``[n]``, the number of the row of each id among those of its feature.
        counts: int64 ``[F]``, distinct rows of each feature; their sum is R.
        offsets: ``[F * B + 1]``, of bags in the ids, feature after feature.
        weights: float32 ``[n]``, of the ids, or empty: 1 for each.
        mean: whether a bag's ids have its inverse length for a weight.
        ends: int64 ``[R]``, out: where the bags of a row end.
        bags: int32 ``[n]``, out: the number of a bag in its feature.
        of: float32 ``[n]``, out: what an id counts there; untouched without weights or means.
    """
    num_bags = (len(offsets) - 1) // len(counts)
    ends[:] = 0
    first = 0
    for feature in range(len(counts)):
        for position in range(offsets[feature * num_bags], offsets[(feature + 1) * num_bags]):
            ends[first + places[position]] += 1
        first += counts[feature]
    start = 0
    for row in range(len(ends)):
        size = ends[row]
        ends[row] = start
        start += size
    first = 0
    for feature in range(len(counts)):
        for bag in range(num_bags):
            begin, end = offsets[feature * num_bags + bag], offsets[feature * num_bags + bag + 1]
            for position in range(begin, end):
                row = first + places[position]
                bags[ends[row]] = bag
                if len(weights):
                    of[ends[row]] = weights[position]
                elif mean:
                    of[ends[row]] = f32(1.0 / (end - begin))
                ends[row] += 1
        first += counts[feature]


# As FBGEMM: what is divided by 0 is infinite, and rows behind it learn.
@numba.njit(cache=True, nogil=True, error_model="numpy")
def learn_rows(
    ids: Any,
    counts: Any,
    ends: Any,
    bags: Any,
    of: Any,
    gradients: Any,
    columns: Any,
    weights: Any,
    weight_starts: Any,
    momentum: Any,
    momentum_starts: Any,
    rate: Any,
    eps: Any,
    part: Any,
    parts: Any,
) -> None:
    """Sum the gradients of each row and have it learn, as FBGEMM's kernels for CPU do bit for bit.

    Args:
        ids: ``[R]``, distinct rows, feature after feature.
        counts, ends, bags: as ``bags_by_row`` has them.
        of: the same; empty where each id counts 1.
        gradients: float32 ``[B, columns]``, of bags.
        columns: ``[F + 1]``, where those of a feature begin.
        weights: address of all tables, one after the other, float32. An array would do, but a
            tensor that was one can not be resized.
        weight_starts: int64 ``[F]``, where the table of a feature begins there.
        momentum: address of a number of each row, likewise.
        momentum_starts: ``[F]``.
        rate, eps: float32.
        part, parts: which of how many equal parts of the rows of each feature.
    """
    widest = 0
    for feature in range(len(counts)):
        widest = max(widest, columns[feature + 1] - columns[feature])
    # Zeros follow a row whose width is no multiple of what is squared at once.
    total, squares = np.empty(widest + _LANES, f32), np.empty(_LANES, f32)
    total_at, bags_at, stride = total.ctypes.data, bags.ctypes.data, gradients.shape[1] * 4
    of_at = of.ctypes.data if len(of) else 0
    first = 0
    for feature in range(len(counts)):
        column = columns[feature]
        width = columns[feature + 1] - column
        total[:] = 0
        table_at = weights + weight_starts[feature] * 4
        state_at = momentum + momentum_starts[feature] * 4
        table, state = float32_at(table_at), float32_at(state_at)
        gradients_at = gradients.ctypes.data + column * 4
        begins = first + counts[feature] * part // parts
        stops = first + counts[feature] * (part + 1) // parts
        first += counts[feature]
        for place in range(begins, stops):
            if place + _AHEAD < stops:
                ahead = ids[place + _AHEAD]
                prefetch(state_at + ahead * 4)
                for line in range(0, width * 4, 64):
                    prefetch(table_at + ahead * width * 4 + line)
            begin, end = ends[place - 1] if place else 0, ends[place]
            _sum_row(total_at, gradients_at, width, stride, bags_at, begin, end, of_at)
            squares[:] = 0
            for start in range(0, width, _LANES):
                for lane in range(_LANES):
                    squares[lane] += total[start + lane] * total[start + lane]
            low = (squares[0] + squares[1]) + (squares[2] + squares[3])
            high = (squares[4] + squares[5]) + (squares[6] + squares[7])
            row = ids[place]
            state[row] += (low + high) / f32(width)
            step = -rate / (np.sqrt(state[row]) + eps)
            for scalar in range(width):
                table[row * width + scalar] += step * total[scalar]


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
        """Look rows up; use FBGEMM's backward pass in cases that the loops do not cover."""
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

"""Row-wise Adagrad on CPU with compiled loops."""

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
#: Number of scalars that FBGEMM squares at once: one AVX2 register. The order of summation affects
#: the last bits of a sum.
_LANES = 8
#: Prefetch distance in rows.
_AHEAD = 8


def _sum_of(lanes: int) -> Any:
    """Return an intrinsic that sums ``lanes`` gradient scalars over bags in a register.

    Its arguments are addresses, except the first and the last bag of a row and the bytes from one
    bag's gradients to the next. The address of the bag weights may be 0.
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

            # Allocate at the start of the function: in a loop, each allocation would stay on the
            # stack.
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
    """Sum the gradients of a row of ``width`` scalars, a multiple of 4."""
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
    """Find the bags that contain each row.

    Args:
        places: int64 ``[n]``, index of each id's row among the distinct rows of its feature.
        counts: int64 ``[F]``, distinct rows of each feature; their sum is R.
        offsets: ``[F * B + 1]``, bag offsets into the ids, feature by feature.
        weights: float32 ``[n]``, weight of each id; empty means 1.
        mean: whether ids are weighted by the inverse length of their bag.
        ends: int64 ``[R]``, out: end of each row's bags in ``bags``.
        bags: int32 ``[n]``, out: index of the bag in its feature.
        of: float32 ``[n]``, out: weight of the id there; not written without weights or means.
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


# As in FBGEMM: division by 0 gives infinity, and the following rows are still updated.
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
    """Sum the gradients of each row and update it, bit-identical to FBGEMM's CPU kernels.

    Args:
        ids: ``[R]``, distinct rows, feature by feature.
        counts, ends, bags: as in ``bags_by_row``.
        of: as in ``bags_by_row``; empty if all weights are 1.
        gradients: float32 ``[B, columns]``, of bags.
        columns: ``[F + 1]``, first column of each feature.
        weights: address of all tables, one after the other, float32. An array would do, but a
            tensor that was one can not be resized.
        weight_starts: int64 ``[F]``, start of each feature's table in ``weights``.
        momentum: address of the momentum of all rows, one scalar per row.
        momentum_starts: ``[F]``, start of each feature's table in ``momentum``.
        rate, eps: float32.
        part, parts: index of the part to update, of ``parts`` equal parts of each feature's rows.
    """
    widest = 0
    for feature in range(len(counts)):
        widest = max(widest, columns[feature + 1] - columns[feature])
    # Rows are padded with zeros if their width is not a multiple of the register width.
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


# Minimum number of rows per extra thread.
_ROWS_PER_THREAD = 16384


class RowWiseAdagrad(SplitTableBatchedEmbeddingBagsCodegen):
    """An FBGEMM kernel on CPU whose rows are updated by compiled loops.

    For this optimizer, FBGEMM (1.6 to 1.9) generates code that switches between AVX and SSE
    instructions six times per row. An Intel Xeon with AMX stalls at each switch: a row of 16
    scalars takes 0.46 us, but memory and arithmetic take only 0.05 us. All sums are added in
    FBGEMM's order, so weights and optimizer states are bit-identical.
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
            or not self.hash_size_cumsum.diff().all()  # the previous feature has the same table
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
    """Autograd function: lookup by FBGEMM, row updates by compiled loops in the backward pass."""

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
        # Saved as FBGEMM saves them, so autograd detects in-place changes before the backward pass.
        ctx.save_for_backward(
            kernel._indices,  # after FBGEMM's bounds check
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
    """Update rows of an FBGEMM row-wise Adagrad kernel on CPU with compiled loops, in place.

    Kernels with weight decay, clipping or counters, or with dtypes other than float32, do not
    change.
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

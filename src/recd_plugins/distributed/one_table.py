"""FBGEMM's CPU kernels with all tables of a kernel looked up as one: exact, and faster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import DataError

# FBGEMM's kernel for bags counts the rows of a table in 32 bits.
_MOST_ROWS = 2**31 - 2
# What a kernel knows of its tables (fbgemm 1.6 to 1.9; none is documented).
_OF_TABLES = (
    "dims",
    "pooling_mode",
    "is_nobag",
    "total_D",
    "D_offsets",
    "total_hash_size",
    "hash_size_cumsum",
    "rows_per_table",
    "weights_offsets",
    "bounds_check_mode_int",
    "embedding_table_index_type",
    "prepare_inputs",
    "table_names",
    "feature_table_map",
)


def fits_one_table(kernel: Any) -> bool:
    """Whether the tables of an FBGEMM kernel are one table below each other: equally wide, on CPU.

    Raises:
        SetupError: FBGEMM has other internals than 1.6 to 1.9.
    """
    require_attributes(kernel, "use_cpu", *_OF_TABLES)
    return kernel.use_cpu and len(set(kernel.dims)) == 1 and kernel.total_hash_size <= _MOST_ROWS


def look_up_bags(
    kernel: Any, features: KeyedJaggedTensor, offsets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """What the kernel gives for bags of ids, whatever feature each is of.

    FBGEMM wants equally many bags of every feature of a kernel, which are padded for it. All tables
    stand in one piece of memory, and so does their optimizer state: with the rows before its table
    added to an id, they are one table, and any number of bags of it will do. Weights, optimizer
    state and update rule are those of the kernel.

    Args:
        kernel: an FBGEMM kernel that ``fits_one_table``; one without pooling sums.
        features: ids of its features, in its order.
        offsets: of the bags in the ids, ``[num_bags + 1]``; no bag has ids of two features.
        weights: of the ids; those of ``features`` do not count.

    Returns:
        ``[num_bags, embedding_dim]``.

    Raises:
        DataError: an id is outside of its table and FBGEMM does not replace it.
    """
    # Bounds are those of each table: checked with a bag a feature.
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
    """Refuse ids that are outside of their table, which would be rows of another one below it.

    FBGEMM's check of bounds puts 0 in the place of most; it lets -1 pass, which means a pruned row
    elsewhere, and everything where it is off. Its own kernels on CPU raise then.

    Args:
        ids: as they are looked up, in the order of ``features``, in CPU memory.
        features: whose ids they are.
        rows: of the table, or of its shard here, of each feature.
        table: the name of a feature's, by the number of the feature.

    Raises:
        DataError: names table, feature and id.
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
            here = f"its shard here has rows 0 to {limit - 1}" if limit else "it has no row here"
            raise DataError(
                f"table {table(number)}: id {int(outside[0])} of feature {feature} was looked up, "
                f"and {here}"
            )


def _one_table(kernel: Any) -> Any:
    """The kernel with one table of all rows; parameters are the kernel's own."""
    one = copy.copy(kernel)
    one._buffers = {
        # Of weights and of optimizer state, by feature.
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

"""Deduplication of feature groups of a KJT: compiled kernels on CPU, torch on other devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.dedup import Deduplicator
from recd_plugins.sparse.jagged import positions_of_rows

#: Multipliers of splitmix64, as int64.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class UniqueGroup:
    """The U distinct rows of a group of F features, in the order of first occurrence.

    Attributes:
        values: ids, feature by feature.
        lengths: ``[F * U]``, in the dtype of the KJT's lengths.
        inverse_lookup: int64 ``[B]``.
        weights: a weight for each value, or None.
    """

    values: Tensor
    lengths: Tensor
    inverse_lookup: Tensor
    weights: Tensor | None


def deduplicate(kjt: KeyedJaggedTensor, groups: Sequence[Sequence[str]]) -> list[UniqueGroup]:
    """Merge rows of a group that are equal in all its features, values and weights."""
    _check_groups(kjt, groups)
    position = {key: index for index, key in enumerate(kjt.keys())}
    positions = [[position[key] for key in group] for group in groups]
    if kernels_can_read(kjt):
        return _by_kernel(kjt, positions)
    return [_by_torch(kjt, group) for group in positions]


def kernels_can_read(kjt: KeyedJaggedTensor) -> bool:
    """Return whether kernels can read the KJT's memory."""
    weights = kjt.weights_or_none()
    return all(
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.element_size() in (4, 8)
        and not tensor.requires_grad
        for tensor in (kjt.values(), *(() if weights is None else (weights,)))
    )


def _by_kernel(kjt: KeyedJaggedTensor, groups: Sequence[Sequence[int]]) -> list[UniqueGroup]:
    stride, offsets = kjt.stride(), kjt.offsets().numpy()
    weights = kjt.weights_or_none()
    buffers = [kjt.values().numpy(), *(() if weights is None else (weights.numpy(),))]
    columns = [
        [
            (buffer, offsets[position * stride : (position + 1) * stride + 1])
            for buffer in buffers
            for position in group
        ]
        for group in groups
    ]
    results = []
    for unique in Deduplicator()(columns, stride):
        tensors = [torch.from_numpy(array) for array in unique.values]
        if len(tensors) < len(buffers):  # buffers of one dtype share an array
            tensors = list(tensors[0].tensor_split(2))
        # The weight columns come second, with the same lengths.
        lengths = torch.from_numpy(unique.lengths[: unique.lengths.size // len(buffers)])
        results.append(
            UniqueGroup(
                values=tensors[0],
                lengths=lengths.to(kjt.lengths().dtype),
                inverse_lookup=torch.from_numpy(unique.inverse_lookup),
                weights=None if weights is None else tensors[1],
            )
        )
    return results


def _by_torch(kjt: KeyedJaggedTensor, group: Sequence[int]) -> UniqueGroup:
    stride, offsets = kjt.stride(), kjt.offsets()
    values, weights = kjt.values(), kjt.weights_or_none()
    columns = []
    for position in group:
        column_offsets = offsets[position * stride : (position + 1) * stride + 1]
        columns.append((values, column_offsets))
        if weights is not None:
            columns.append((weights, column_offsets))
    first_rows, inverse_lookup = first_equal_rows(columns, stride)
    rows = torch.cat([first_rows + position * stride for position in group])
    positions, lengths = positions_of_rows(offsets, rows)
    return UniqueGroup(
        values=values.index_select(0, positions),
        lengths=lengths.to(kjt.lengths().dtype),
        inverse_lookup=inverse_lookup,
        weights=None if weights is None else weights.index_select(0, positions),
    )


def _check_groups(kjt: KeyedJaggedTensor, groups: Sequence[Sequence[str]]) -> None:
    if kjt.variable_stride_per_key():
        raise ValueError(
            "the KJT has a variable batch per feature: its rows do not belong together"
        )
    weights = kjt.weights_or_none()
    if weights is not None and weights.requires_grad:
        raise ValueError(
            "the KJT has weights that require a gradient, which equal rows would share; "
            "detach() them, or make weights of the unique rows"
        )
    for key in {key for group in groups for key in group} - set(kjt.keys()):
        raise ValueError(f"the KJT has no feature {key!r}, only {', '.join(kjt.keys())}")


def first_equal_rows(
    columns: Sequence[tuple[Tensor, Tensor]], num_rows: int
) -> tuple[Tensor, Tensor]:
    """Find the rows that are equal in every column, bit by bit.

    Rows with equal hashes are compared, so a collision costs only time.

    Returns:
        The first occurrence of each unique row, int64 ``[U]``, ascending, and ``inverse_lookup``,
        int64 ``[B]``.
    """
    device = columns[0][1].device
    columns = [(_bits(values), offsets) for values, offsets in columns]
    first = torch.arange(num_rows, device=device)
    # Equal rows move to the next round together, and the first row of each hash never does. So
    # every round settles some rows.
    unsettled, seed = first, 0
    while unsettled.numel():
        hashes, codes = torch.unique(
            _hash_rows(columns, unsettled, seed), return_inverse=True, sorted=False
        )
        leaders = torch.full_like(hashes, num_rows).scatter_reduce_(0, codes, unsettled, "amin")
        candidates = leaders.index_select(0, codes)
        equal = _rows_equal(columns, unsettled, candidates)
        first = first.index_copy(0, unsettled[equal], candidates[equal])
        unsettled, seed = unsettled[~equal], seed + 1
    is_first = first == torch.arange(num_rows, device=device)
    number = torch.cumsum(is_first, 0) - 1
    return is_first.nonzero().flatten(), number.index_select(0, first)


def _bits(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _mix(numbers: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64, with arithmetic shifts."""
    numbers = (numbers ^ (numbers >> 30)) * _MIX_1
    numbers = (numbers ^ (numbers >> 27)) * _MIX_2
    return numbers ^ (numbers >> 31)


def _hash_rows(columns: Sequence[tuple[Tensor, Tensor]], rows: Tensor, seed: int) -> Tensor:
    total = torch.full_like(rows, seed)
    for values, offsets in columns:
        positions, lengths = positions_of_rows(offsets, rows)
        starts = torch.repeat_interleave(offsets.long().index_select(0, rows), lengths)
        mixed = _mix(values.index_select(0, positions).long() + (positions - starts + 1) * _STEP)
        sums = torch.cat([mixed.new_zeros(1), torch.cumsum(_mix(mixed + seed), 0)])
        ends = torch.cumsum(lengths, 0)
        row_sums = sums.index_select(0, ends) - sums.index_select(0, ends - lengths)
        total = _mix(total * _STEP + row_sums + lengths)
    return total


def _rows_equal(columns: Sequence[tuple[Tensor, Tensor]], left: Tensor, right: Tensor) -> Tensor:
    """Return whether row ``left[i]`` equals row ``right[i]`` in every column, bool ``[n]``."""
    equal = torch.ones_like(left, dtype=torch.bool)
    for _, offsets in columns:
        lengths = torch.diff(offsets)
        equal &= lengths.index_select(0, left) == lengths.index_select(0, right)
    same = equal.nonzero().flatten()
    for values, offsets in columns:
        left_positions, lengths = positions_of_rows(offsets, left[same])
        right_positions, _ = positions_of_rows(offsets, right[same])
        differ = values.index_select(0, left_positions) != values.index_select(0, right_positions)
        rows_that_differ = torch.repeat_interleave(same, lengths)[differ]
        equal[rows_that_differ] = False
    return equal

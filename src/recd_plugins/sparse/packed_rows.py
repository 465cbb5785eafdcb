"""Rows of a KJT that share ids with the row before: compiled in CPU memory, by torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.jagged import positions_of_ranges
from recd_plugins.sparse.partial import RowPacker


@dataclass(frozen=True)
class PackedFeatures:
    """F features of B rows, each row a stretch of its feature's stored ids.

    Attributes:
        values: stored ids, feature by feature.
        offsets: where each row begins in its feature's part of ``values``, int32 ``[F * B]``.
        lengths: of the rows, int32 ``[F * B]``.
        length_per_key: ids stored of each feature.
    """

    values: Tensor
    offsets: Tensor
    lengths: Tensor
    length_per_key: list[int]


def pack(kjt: KeyedJaggedTensor, keys: Sequence[str], max_shift: int) -> PackedFeatures:
    """Store of each row only the ids that the row before does not have.

    Raises:
        ValueError: no keys, one that ``kjt`` lacks or that is named twice, or a ``kjt`` with
            weights or whose number of rows differs from key to key.
    """
    _check(kjt, keys)
    position = {key: index for index, key in enumerate(kjt.keys())}
    positions = [position[key] for key in keys]
    values = kjt.values()
    if values.device.type == "cpu" and values.is_contiguous() and values.element_size() in (4, 8):
        return _by_kernel(kjt, positions, max_shift)
    return by_torch(kjt, positions, max_shift)


def _by_kernel(kjt: KeyedJaggedTensor, positions: Sequence[int], max_shift: int) -> PackedFeatures:
    stride, values, offsets = kjt.stride(), kjt.values().numpy(), kjt.offsets().numpy()
    columns = [(values, offsets[at * stride : (at + 1) * stride + 1]) for at in positions]
    packed = RowPacker(max_shift)(columns, stride)
    return PackedFeatures(
        torch.from_numpy(packed.values),
        torch.from_numpy(packed.offsets).flatten(),
        torch.from_numpy(packed.lengths).flatten(),
        list(packed.sizes),
    )


def by_torch(kjt: KeyedJaggedTensor, positions: Sequence[int], max_shift: int) -> PackedFeatures:
    """The same by torch operations, on any device: the definition that the kernel has to meet."""
    stride, kjt_offsets = kjt.stride(), kjt.offsets().long()
    values, offsets, lengths = [], [], []
    for at in positions:
        row_offsets = kjt_offsets[at * stride : (at + 1) * stride + 1]
        row_lengths = torch.diff(row_offsets)
        added = row_lengths - _shared(kjt.values(), row_offsets, row_lengths, max_shift)
        # The ids that a row adds are its last ones, and a row ends where the stored ids so far do.
        taken = positions_of_ranges(row_offsets[1:] - added, added)
        values.append(kjt.values().index_select(0, taken))
        offsets.append((torch.cumsum(added, 0) - row_lengths).int())
        lengths.append(row_lengths.int())
    return PackedFeatures(
        torch.cat(values), torch.cat(offsets), torch.cat(lengths), [part.numel() for part in values]
    )


def _shared(values: Tensor, offsets: Tensor, lengths: Tensor, max_shift: int) -> Tensor:
    """How many ids of each row are the last ones of the row before, int64 ``[B]``."""
    shared = torch.zeros_like(lengths)
    before = torch.cat([lengths.new_zeros(1), lengths])[: lengths.numel()]
    for moved in reversed(range(max_shift + 1)):
        candidate = (before - moved).clamp(min=0)
        candidate[candidate > lengths] = 0
        current = positions_of_ranges(offsets[:-1], candidate)
        previous = positions_of_ranges(offsets[:-1] - candidate, candidate)
        row = torch.repeat_interleave(candidate)
        differ = values.index_select(0, current) != values.index_select(0, previous)
        candidate[row[differ]] = 0
        # The smallest move counts.
        shared = torch.where(candidate > 0, candidate, shared)
    return shared


def _check(kjt: KeyedJaggedTensor, keys: Sequence[str]) -> None:
    if kjt.variable_stride_per_key():
        raise ValueError(
            "the KJT has a variable batch per feature: its rows do not belong together"
        )
    if kjt.weights_or_none() is not None:
        raise ValueError(
            "the KJT has weights, which an id that rows share cannot have; "
            "use InverseKeyedJaggedTensor.from_kjt"
        )
    unknown = [key for key in keys if key not in kjt.keys()]  # noqa: SIM118
    if unknown:
        raise ValueError(f"the KJT has no feature {unknown[0]!r}, only {', '.join(kjt.keys())}")
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"expected features that are all different, got {list(keys)}")

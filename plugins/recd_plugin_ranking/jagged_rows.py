"""Rows of ids and of their vectors, as a model's batch has them.

``shape[0]`` and not ``len``, which would write the example's size into a program of torch.export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

if TYPE_CHECKING:
    from recd_plugins.api import ModelInput


def padded_last(rows: JaggedTensor, most: int, fill: Tensor) -> tuple[Tensor, Tensor]:
    """The last values of each row, at most ``most``, filled up at its end.

    Args:
        rows: values ``[num_values, ...]``.
        most: values of a row.
        fill: what stands where a row has none, ``[1, ...]``.

    Returns:
        ``[rows, L, ...]``, L being the most that a row has, or ``most`` in a program of
        torch.export, whose sizes do not depend on values; and how many each has, int64.
    """
    lengths = rows.lengths().long()
    kept = lengths.clamp(max=most)
    longest = most
    if not torch.compiler.is_exporting():
        longest = int(kept.max()) if len(kept) else 0
    values = torch.cat([rows.values(), fill])
    place = torch.arange(longest, device=lengths.device)
    index = (lengths.cumsum(0) - kept).unsqueeze(1) + place
    index = index.where(place < kept.unsqueeze(1), torch.full_like(index, rows.values().shape[0]))
    padded = values.index_select(0, index.flatten())
    return padded.view(*index.shape, *values.shape[1:]), kept


def row_sums(rows: JaggedTensor) -> Tensor:
    """The sum of each row's vectors, zeros for an empty one, ``[rows, D]``."""
    lengths = rows.lengths().long()
    values = rows.values()
    of_value = torch.repeat_interleave(lengths, output_size=values.shape[0])
    return values.new_zeros(lengths.shape[0], values.shape[1]).index_add(0, of_value, values)


def only_ids(rows: JaggedTensor) -> Tensor:
    """The id of each row that has one, -1 of all others, int64 ``[rows]``."""
    lengths = rows.lengths().long()
    values = torch.cat([rows.values(), rows.values().new_zeros(1)])
    first = values[(lengths.cumsum(0) - lengths).clamp(max=values.shape[0] - 1)]
    return first.where(lengths == 1, torch.full_like(first, -1))


def expanded(unique: Tensor, inverse: Tensor | None) -> Tensor:
    """Unique rows to all rows."""
    return unique if inverse is None else unique.index_select(0, inverse)


def ids_of_rows(batch: ModelInput, feature: str) -> Tensor:
    """``only_ids`` of a feature, however the batch stores it, int64 ``[B]``."""
    if (kjt := batch.sequence_features) is not None and feature in kjt.keys():  # noqa: SIM118
        unique = only_ids(batch.unique_rows(feature, kjt[feature]))
        return expanded(unique, batch.inverse_lookup.get(feature))
    for kjt in (batch.sparse_features, batch.replicated_features):
        if kjt is not None and feature in kjt.keys():  # noqa: SIM118
            unique = only_ids(kjt[feature])
            if (stored := kjt.inverse_indices_or_none()) is None:
                return unique
            names, inverse = stored
            return unique.index_select(0, inverse[names.index(feature)])
    raise KeyError(feature)

"""The vectors of all rows, out of what a module returned."""

from __future__ import annotations

from typing import Any

import torch
from tests.drop_in.matrix.tables import DIM, FEATURES
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.interfaces.batch import ModelInput


def vectors(found: Any, lengths: dict[str, Tensor], stored: ModelInput | None = None) -> Tensor:
    """The vectors of all rows, features next to each other; of sequences, the sums of a row.

    Args:
        found: what a module returned.
        lengths: ids of each row, by feature.
        stored: how rows gather their ids, where an EmbeddingCollection got those of partial IKJTs.
    """
    if isinstance(found, Awaitable):
        found = found.wait()
    if isinstance(found, tuple):
        each = [part.wait() if isinstance(part, Awaitable) else part for part in found]
        parts = [vectors(part, lengths, stored) for part in each if part is not None]
        return torch.cat(parts, dim=1)
    if isinstance(found, Tensor):
        return found.flatten(1)
    if stored is not None:
        return torch.cat([_gathered(found[name], name, stored) for name in FEATURES], dim=1)
    return torch.cat([_vector(found[name], lengths[name]) for name in FEATURES], dim=1)


def _vector(found: Tensor | JaggedTensor, lengths: Tensor) -> Tensor:
    if isinstance(found, Tensor):
        return found
    return _sums(found.values(), lengths)


def _gathered(found: JaggedTensor, feature: str, stored: ModelInput) -> Tensor:
    unique = stored.unique_rows(feature, found)
    return _sums(unique.values(), unique.lengths()).index_select(0, stored.inverse_lookup[feature])


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(lengths.numel(), device=values.device)
    row_of = rows.repeat_interleave(lengths.to(rows).long())
    return values.new_zeros(lengths.numel(), DIM, dtype=torch.float32).index_add(
        0, row_of, values.float()
    )

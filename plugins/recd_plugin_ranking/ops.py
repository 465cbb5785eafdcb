"""Tensor functions of ranking models: padding of jagged rows, and softmax with logQ correction.

Uses ``shape[0]`` instead of ``len``, because torch.export would record ``len`` as a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

if TYPE_CHECKING:
    from recd_plugins.api import ModelInput


def padded_last(rows: JaggedTensor, most: int, fill: Tensor) -> tuple[Tensor, Tensor]:
    """Convert jagged rows to a padded tensor of the last ``most`` values of each row.

    Args:
        rows: values ``[num_values, ...]``.
        most: maximum number of values per row.
        fill: padding value, ``[1, ...]``.

    Returns:
        Padded values ``[rows, L, ...]``, and the number of values of each row, int64 ``[rows]``.
        L is the longest row, or ``most`` in torch.export.
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


def only_ids(rows: JaggedTensor) -> Tensor:
    """Return the id of each row, int64 ``[rows]``, or -1 for rows without exactly one id."""
    lengths = rows.lengths().long()
    values = torch.cat([rows.values(), rows.values().new_zeros(1)])
    first = values[(lengths.cumsum(0) - lengths).clamp(max=values.shape[0] - 1)]
    return first.where(lengths == 1, torch.full_like(first, -1))


def expanded(unique: Tensor, inverse: Tensor | None) -> Tensor:
    return unique if inverse is None else unique.index_select(0, inverse)


def ids_of_rows(batch: ModelInput, feature: str) -> Tensor:
    """Return the id of each batch row, int64 ``[B]``, or -1 for rows without exactly one id."""
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


def shares(counts: NDArray[Any]) -> NDArray[np.float32]:
    """Return each item's share of the positive rows ``counts``, ``[C]``; 0 counts as 0.5."""
    smoothed = np.maximum(counts, 0.5)
    return np.asarray(smoothed / smoothed.sum(), np.float32)


def log_of_presence(share: Tensor, num_draws: Tensor) -> Tensor:
    """Return the log-probability that at least one of ``num_draws`` draws is a given item."""
    return (-torch.expm1(num_draws * torch.log1p(-share.double()))).log().float()


@dataclass(frozen=True)
class Candidates:
    """Distinct candidate items: ids, int64 ``[C]``, and vectors, ``[C, D]``."""

    ids: Tensor
    vectors: Tensor

    @classmethod
    def of(
        cls, ids: Tensor, vectors: Tensor, most: int | None, generator: torch.Generator
    ) -> Candidates:
        """Return up to ``most`` random distinct items of ids ``[N]`` and vectors ``[N, D]``."""
        unique, which = torch.unique(ids, return_inverse=True)
        places = torch.arange(len(ids), device=ids.device)
        first = places.new_full((len(unique),), len(ids)).scatter_reduce(0, which, places, "amin")
        if most is not None and len(unique) > most:
            drawn = torch.randperm(len(unique), generator=generator, device=ids.device)[:most]
            unique, first = unique[drawn], first[drawn]
        return cls(unique, vectors.index_select(0, first))


def losses_among(
    candidates: Candidates,
    queries: Tensor,
    targets: Tensor,
    target_vectors: Tensor,
    correction: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the softmax cross-entropy of each query's target among the candidates, ``[Q]``.

    Args:
        candidates: items to compare with. A candidate equal to the target is ignored.
        queries: ``[Q, D]``.
        targets: target item ids, ``[Q]``.
        target_vectors: ``[Q, D]``.
        correction: value to subtract from the logit of each item, indexed by item id;
            None for no correction.
        temperature: divisor of the logits.
    """
    logits = queries @ candidates.vectors.T / temperature
    own = (queries * target_vectors).sum(1) / temperature
    if correction is not None:
        logits = logits - correction[candidates.ids]
        own = own - correction[targets]
    same = candidates.ids == targets.unsqueeze(1)
    logits = logits.masked_fill(same, -torch.inf)
    return torch.cat([own.unsqueeze(1), logits], 1).logsumexp(1) - own


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of losses, or 0 if all weights are 0."""
    return (losses * weights).sum() / weights.sum().clamp(min=1e-12)


def full_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits ``[Q, num_items]`` per query; 0 for target -1, ``[Q]``."""
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")

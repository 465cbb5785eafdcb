"""Softmax over items of the batch in place of all items, corrected for how popular they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F


def shares(counts: NDArray[Any]) -> NDArray[np.float32]:
    """The probability that a positive row is of an item, ``[num_items]``.

    An item of which there is no row counts as half a one.
    """
    smoothed = np.maximum(counts, 0.5)
    return np.asarray(smoothed / smoothed.sum(), np.float32)


def log_of_presence(share: Tensor, num_draws: Tensor) -> Tensor:
    """The log of the probability that an item is among ``num_draws`` drawn ones."""
    return (-torch.expm1(num_draws * torch.log1p(-share.double()))).log().float()


@dataclass(frozen=True)
class Candidates:
    """Items among which a positive one is to be found, each once.

    Attributes:
        ids: int64 ``[C]``.
        vectors: ``[C, D]``.
    """

    ids: Tensor
    vectors: Tensor

    @classmethod
    def of(
        cls, ids: Tensor, vectors: Tensor, most: int | None, generator: torch.Generator
    ) -> Candidates:
        """Of ids ``[N]`` and their vectors ``[N, D]``, drawn where they are more than ``most``."""
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
    """The cross-entropy of each query, ``[Q]``.

    Args:
        candidates: an item of them that is the query's target is not counted twice.
        queries: ``[Q, D]``.
        targets: ids, ``[Q]``.
        target_vectors: ``[Q, D]``.
        correction: to be taken from the logit of an item, by id; None for none.
        temperature: of the logits.
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
    """0, with gradients of 0, where nothing weighs."""
    return (losses * weights).sum() / weights.sum().clamp(min=1e-12)


def full_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all items ``[Q, num_items]``; 0 where a target is -1."""
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")

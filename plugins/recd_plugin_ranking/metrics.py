"""``ranking.metrics``: ranking metrics, averaged over all orders of tied items.

torchmetrics and torchrec.metrics break ties by row order, which flatters constant scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lgamma
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from recd_plugins.api import DataError, Metric, PluginOptions, ScoredBatch

if TYPE_CHECKING:
    from torch import Tensor


Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Groups of samples with equal scores, sorted by query and then by descending score.

    Attributes:
        query: int64 ``[blocks]``, the number of the query.
        ahead: int64 ``[blocks]``, number of samples of the query with a higher score.
        size, positives: int64 ``[blocks]``, number of samples and of positive samples.
    """

    query: Int64s
    ahead: Int64s
    size: Int64s
    positives: Int64s

    @classmethod
    def of(cls, queries: Int64s, scores: Floats, labels: NDArray[np.bool_]) -> Blocks:
        """Group samples ``[N]``, given in any order, into blocks of equal scores."""
        from recd_plugins.api import tie_groups

        groups = tie_groups(scores)
        order = np.lexsort((-groups, queries))
        query, group = queries[order], groups[order]
        new_query = np.r_[True, query[1:] != query[:-1]][: len(query)]
        starts = np.flatnonzero(new_query | np.r_[True, group[1:] != group[:-1]][: len(query)])
        number = np.cumsum(new_query) - 1
        begins = np.flatnonzero(new_query)[number[starts]]
        size = np.diff(np.r_[starts, len(query)])
        positives = np.add.reduceat(labels[order].astype(np.int64), starts)
        return cls(number[starts], starts - begins, size, positives)

    def sums(self, values: Floats | Int64s) -> Floats:
        """Sum values ``[blocks]`` per query, float64 ``[queries]``."""
        found: Floats = np.bincount(self.query, values).astype(np.float64)
        return found


def figures(
    queries: Int64s, scores: Floats, labels: NDArray[np.bool_], most: Sequence[int]
) -> dict[str, tuple[float, int]]:
    """Return the sum of each metric over queries, and the number of queries, keyed by metric name.

    Queries without a positive sample are ignored, and by ``gauc`` also those without a negative.

    Args:
        queries, scores, labels: query, score and label of each sample, ``[N]``.
        most: cutoffs k of the top-k metrics.
    """
    found: dict[str, tuple[float, int]] = {}
    if not len(queries):
        return found
    blocks = Blocks.of(queries, scores, labels)
    wanted = blocks.sums(blocks.positives)
    counts = wanted > 0

    def add(name: str, values: Floats, of: NDArray[np.bool_] = counts) -> None:
        found[name] = float(values[of].sum()), int(of.sum())

    negatives = blocks.size - blocks.positives
    behind = blocks.sums(negatives)[blocks.query] - _before(blocks, negatives) - negatives
    both = counts & (blocks.sums(negatives) > 0)
    pairs = np.where(both, wanted * blocks.sums(negatives), 1)
    add("gauc", blocks.sums(blocks.positives * (behind + negatives / 2)) / pairs, both)
    add("mrr", _reciprocal_rank(blocks))
    share = blocks.positives / blocks.size
    for k in most:
        first, last = np.minimum(blocks.ahead, k), np.minimum(blocks.ahead + blocks.size, k)
        gains = np.r_[0, np.cumsum(1 / np.log2(np.arange(k) + 2))]
        ideal = gains[np.minimum(np.maximum(wanted, 1), k).astype(np.int64)]
        add(f"ndcg_at_{k}", blocks.sums(share * (gains[last] - gains[first])) / ideal)
        add(f"recall_at_{k}", blocks.sums(share * (last - first)) / np.maximum(wanted, 1))
        add(f"hr_at_{k}", 1 - np.exp(blocks.sums(_log_misses(blocks, last - first))))
    return found


def means(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return each metric's mean over all queries of ``figures`` results; NaN without queries."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {name: [part[name] for part in parts if name in part] for name in names}
    return {
        name: sum(s for s, _ in each) / n if (n := sum(n for _, n in each)) else float("nan")
        for name, each in sums.items()
    }


def _before(blocks: Blocks, values: Int64s) -> Int64s:
    """Return the sum of ``values`` over the query's blocks with higher scores, ``[blocks]``."""
    total = np.cumsum(values) - values
    begins = np.flatnonzero(blocks.ahead == 0)
    before: Int64s = total - total[begins][blocks.query]
    return before


def _log_misses(blocks: Blocks, slots: Int64s) -> Floats:
    """Return the log-probability that a block, in random order, starts with ``slots`` negatives."""
    misses = np.zeros(len(slots))
    there = (blocks.positives > 0) & (slots > 0)
    misses[there & (blocks.size - blocks.positives < slots)] = -np.inf
    for i in np.flatnonzero(there & (blocks.size - blocks.positives >= slots)):
        size, positives, taken = int(blocks.size[i]), int(blocks.positives[i]), int(slots[i])
        misses[i] = _log_choose(size - positives, taken) - _log_choose(size, taken)
    return misses


def _reciprocal_rank(blocks: Blocks) -> Floats:
    """Return the expected value of 1 / rank of the first positive sample, ``[queries]``."""
    found = np.zeros(int(blocks.query[-1]) + 1)
    with_positive = np.flatnonzero(blocks.positives > 0)
    _, first = np.unique(blocks.query[with_positive], return_index=True)
    for i in with_positive[first]:
        size, positives = int(blocks.size[i]), int(blocks.positives[i])
        ranks = blocks.ahead[i] + 1 + np.arange(size - positives + 1)
        stays = (size - positives - np.arange(len(ranks))) / (size - np.arange(len(ranks)))
        before = np.r_[1.0, np.cumprod(stays)[:-1]]
        found[blocks.query[i]] = (before * (1 - stays) / ranks).sum()
    return found


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


#: Sessions, logits and labels of each batch.
State = list[tuple["Tensor", "Tensor", "Tensor"]]


class RankingMetrics(Metric):
    """GAUC, MRR, and NDCG, recall and hit rate at k, as means over requests, else sessions."""

    name = "ranking.metrics"

    class Options(PluginOptions):
        names: list[Literal["gauc", "mrr", "ndcg", "recall", "hr"]] = Field(
            default=["gauc", "mrr", "ndcg", "recall", "hr"],
            min_length=1,
            description="Metrics to report. Each is a mean over requests (or sessions) with "
            "a positive sample, for gauc also a negative one.",
        )
        k: list[PositiveInt] = Field(
            default=[10], min_length=1, description="Cutoffs k for ndcg, recall and hr."
        )

    options: Options

    def start(self) -> State:
        return []

    def update(self, state: State, batch: ScoredBatch) -> State:
        if batch.sessions is None:
            raise DataError(
                f"{self.name}: the dataset has no session column. Set a session column in "
                "dataset.options."
            )
        state.append((batch.sessions, batch.logits, batch.labels))
        return state

    def results(self, states: Sequence[State]) -> Mapping[str, float]:
        import torch

        batches = [batch for state in states for batch in state]
        sessions, logits, labels = (torch.cat(each).numpy() for each in zip(*batches, strict=True))
        found = means([figures(sessions, logits.astype(np.float64), labels > 0.5, self.options.k)])
        return {
            name: value
            for name, value in found.items()
            if name.partition("_at_")[0] in self.options.names
        }

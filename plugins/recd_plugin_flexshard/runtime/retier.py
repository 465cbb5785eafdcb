"""Re-tiering: the tiers' rows are chosen anew from the accesses of the last steps, over all ranks.

The key of a row is that of ``TierIndex``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from recd_plugin_flexshard.runtime.collection import RowTiers
from recd_plugin_flexshard.runtime.split import TierIndex, TierSplit
from recd_plugins.api import add_counts, keep_most_read

_logger = logging.getLogger(__name__)
_TIERS = ("cold", "hot", "flex")
HOT, FLEX, COLD = range(3)
# Counts from here on are one class where the least count of a chosen row is sought.
_LARGEST_COUNT = 1 << 16

Keys = NDArray[np.int64]


class RecentAccesses:
    """Counts of this rank since the last ``take``.

    Exact while at most ``bound`` rows were read; beyond it the heaviest are kept, and a count is
    too low by less than a share ``1 / bound`` of all accesses.

    Args:
        bound: rows that are counted, and ids that are kept until they are counted.
    """

    def __init__(self, bound: int = 1 << 20) -> None:
        self._bound = bound
        self._forget()

    def _forget(self) -> None:
        self._uncounted: list[Tensor] = []
        self._num_uncounted = 0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float64)

    def add(self, keys: Tensor) -> None:
        """Count one access of each of ``keys``, int64 of any device; negative ones are no rows."""
        self._uncounted.append(keys)
        self._num_uncounted += keys.numel()
        if self._num_uncounted >= self._bound:
            self._count()

    def take(self) -> tuple[Keys, NDArray[np.float64]]:
        """The rows that were read, ascending, and how often; forgets them."""
        self._count()
        taken = self._keys, self._counts
        self._forget()
        return taken

    def _count(self) -> None:
        if not self._uncounted:
            return
        keys, counts = torch.unique(torch.cat(self._uncounted), return_counts=True)
        new, times = keys.cpu().numpy(), counts.cpu().numpy().astype(np.float64)
        first = np.searchsorted(new, 0)
        self._keys, self._counts, _ = keep_most_read(
            *add_counts([self._keys, new[first:]], [self._counts, times[first:]]), self._bound
        )
        self._uncounted, self._num_uncounted = [], 0


@dataclass(frozen=True)
class Chosen:
    """The rows of the overlays, and what they would have been worth in the last steps.

    Attributes:
        hot: keys, most read first.
        flex: keys, most read first.
        accesses: of all ranks, that were counted.
        covered_before: those of rows that were hot or flex.
        covered_after: those of rows that are now.
    """

    hot: Keys
    flex: Keys
    accesses: float
    covered_before: float
    covered_after: float


def choose_rows(
    read: tuple[Keys, NDArray[np.float64]],
    hot: Keys,
    flex: Keys,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Chosen:
    """The most read rows become hot, the next ones flex, as many of each as now.

    Of rows that were read equally often those that are hot stay before those that are flex, and
    these before others: nothing moves without a reason. A collective call, and the result is the
    same on all ranks.

    Args:
        read: the rows that this rank read, distinct, and how often.
        hot: keys that are hot now.
        flex: keys that are flex now.
        device: for the collectives.
        group: all ranks.
    """
    counted = _counts_of_this_rank(*read, device, group)
    candidates = _with_tiers(*counted, *(_of_this_rank(keys, group) for keys in (hot, flex)))
    covered = candidates.counts[candidates.tiers != COLD].sum()
    sums = torch.tensor([candidates.counts.sum(), covered], dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    size = len(hot) + len(flex)
    best = _gather(_best(candidates, size, device, group), device, group).first(size)
    return Chosen(
        best.keys[: len(hot)],
        best.keys[len(hot) :],
        float(sums[0]),
        float(sums[1]),
        float(best.counts.sum()),
    )


@dataclass(frozen=True)
class _Candidates:
    """Rows by count, the most read first; of equal ones hot, then flex, then cold ones."""

    keys: Keys
    counts: NDArray[np.float64]
    tiers: NDArray[np.int64]

    def __post_init__(self) -> None:
        order = np.lexsort((self.keys, self.tiers, -self.counts))
        for name in ("keys", "counts", "tiers"):
            object.__setattr__(self, name, getattr(self, name)[order])

    def first(self, num_rows: int) -> _Candidates:
        return _Candidates(self.keys[:num_rows], self.counts[:num_rows], self.tiers[:num_rows])


def _rank_of(keys: Keys, world_size: int) -> NDArray[np.int64]:
    """The rank that adds a row's counts up. Mixed, as often read rows may have a common factor."""
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    return (mixed % np.uint64(world_size)).astype(np.int64)


def _of_this_rank(keys: Keys, group: dist.ProcessGroup) -> Keys:
    return keys[_rank_of(keys, group.size()) == group.rank()]


def _counts_of_this_rank(
    keys: Keys, counts: NDArray[np.float64], device: torch.device, group: dist.ProcessGroup
) -> tuple[Keys, NDArray[np.float64]]:
    """Over all ranks, the counts of the rows that this one adds up."""
    ranks = _rank_of(keys, group.size())
    order = np.argsort(ranks, kind="stable")
    sent = torch.from_numpy(np.stack([keys[order], counts[order].astype(np.int64)], axis=1))
    num_sent = torch.from_numpy(np.bincount(ranks, minlength=group.size())).to(device)
    num_received = torch.empty_like(num_sent)
    dist.all_to_all_single(num_received, num_sent, group=group)
    received = torch.empty((int(num_received.sum()), 2), dtype=torch.int64, device=device)
    dist.all_to_all_single(
        received, sent.to(device), num_received.tolist(), num_sent.tolist(), group=group
    )
    rows, times = received.cpu().numpy().T
    return add_counts([rows], [times.astype(np.float64)])


def _with_tiers(keys: Keys, counts: NDArray[np.float64], hot: Keys, flex: Keys) -> _Candidates:
    """The rows that were read, and those that are hot or flex, read or not."""
    chosen = np.concatenate([hot, flex])
    every, counts = add_counts([keys, chosen], [counts, np.zeros(len(chosen))])
    tiers = np.full(len(every), COLD)
    tiers[np.searchsorted(every, hot)] = HOT
    tiers[np.searchsorted(every, flex)] = FLEX
    return _Candidates(every, counts, tiers)


def _best(
    candidates: _Candidates, size: int, device: torch.device, group: dist.ProcessGroup
) -> _Candidates:
    """Those of this rank that can be among the ``size`` best of all ranks."""
    classes = np.minimum(candidates.counts, _LARGEST_COUNT).astype(np.int64)
    histogram = torch.from_numpy(np.bincount(classes, minlength=_LARGEST_COUNT + 1)).to(device)
    dist.all_reduce(histogram, group=group)
    at_least = histogram.cpu().numpy()[::-1].cumsum()[::-1]
    # The last class of which some are chosen: of more read rows all are.
    least = int(np.flatnonzero(at_least >= size)[-1])
    num_above = int(at_least[least + 1]) if least < _LARGEST_COUNT else 0
    above = int((classes > least).sum())
    return candidates.first(min(above + size - num_above, int((classes >= least).sum())))


def _gather(candidates: _Candidates, device: torch.device, group: dist.ProcessGroup) -> _Candidates:
    """Those of all ranks."""
    mine = torch.from_numpy(
        np.stack([candidates.keys, candidates.counts.astype(np.int64), candidates.tiers])
    ).to(device)
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = mine.shape[1]
    dist.all_reduce(sizes, group=group)
    num_rows: list[int] = sizes.tolist()
    padded = mine.new_zeros((3, max(num_rows)))
    padded[:, : mine.shape[1]] = mine
    parts = [torch.empty_like(padded) for _ in num_rows]
    dist.all_gather(parts, padded, group=group)
    keys, counts, tiers = (
        torch.cat([part[:, :rows] for part, rows in zip(parts, num_rows, strict=True)], dim=1)
        .cpu()
        .numpy()
    )
    return _Candidates(keys, counts.astype(np.float64), tiers)


@dataclass(frozen=True)
class RetierReport:
    """What a new choice of rows changed, in all tables of a collection.

    Attributes:
        step: training batches that were distributed before.
        moved: rows by the tiers that they moved from and to, ``("cold", "hot")`` and so on; only
            changes that happened.
        a2a_share_before: share of the last steps' accesses, of all ranks, that were of cold rows
            and took the all-to-all over all ranks.
        a2a_share_after: what the share would have been with the new tiers.
    """

    step: int
    moved: Mapping[tuple[str, str], int]
    a2a_share_before: float
    a2a_share_after: float

    def __str__(self) -> str:
        moves = ", ".join(f"{count} {old} to {new}" for (old, new), count in self.moved.items())
        return (
            f"tiers chosen anew after step {self.step}: {moves or 'no row moves'}; accesses by the "
            f"global all-to-all {self.a2a_share_before:.1%} to {self.a2a_share_after:.1%}"
        )


class Retiering:
    """Counts accesses while training, and chooses rows anew after every ``every`` batches.

    Sizes of the tiers, over all tables together, stay: the most read rows become hot, the next
    ones flex. A table may gain rows that another one loses.

    Args:
        every: batches that are distributed in training mode.

    Attributes:
        reports: one for each choice.
    """

    def __init__(self, every: int) -> None:
        # No tier's group, whose traffic is that of steps.
        world = dist.group.WORLD
        assert world is not None
        self.reports: list[RetierReport] = []
        self._every = every
        self._group = world
        self._steps = 0
        self._recent = RecentAccesses()

    def next_index(self, index: TierIndex) -> TierIndex:
        """What to divide the next training batch by: ``index``, or another when it is time.

        A collective call then, after the same number of batches on all ranks.
        """
        if not self._steps or self._steps % self._every:
            return index
        old = index.chosen_keys()
        chosen = choose_rows(self._recent.take(), *old, index.device, self._group)
        moved = _moves(old, (chosen.hot, chosen.flex))
        self._report(moved, chosen)
        return replace(index, tiers=_tiers(index, chosen)) if moved else index

    def count(self, split: TierSplit) -> None:
        """Count the accesses of a training batch."""
        self._steps += 1
        self._recent.add(split.index.keys(split.ids, split.ids_per_feature))

    def _report(self, moved: Mapping[tuple[str, str], int], chosen: Chosen) -> None:
        accesses = max(chosen.accesses, 1.0)
        before, after = chosen.covered_before / accesses, chosen.covered_after / accesses
        self.reports.append(RetierReport(self._steps, moved, 1 - before, 1 - after))
        if self._group.rank() == 0:
            _logger.info("%s", self.reports[-1])


def _tiers(index: TierIndex, chosen: Chosen) -> dict[str, RowTiers]:
    hot, flex = (_rows_by_table(keys, index.first_keys) for keys in (chosen.hot, chosen.flex))
    return {table: RowTiers(hot[number], flex[number]) for number, table in enumerate(index.tiers)}


def _rows_by_table(
    keys: NDArray[np.int64], first_keys: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """In the order of the keys."""
    tables = np.searchsorted(first_keys, keys, side="right") - 1
    return [keys[tables == number] - first for number, first in enumerate(first_keys.tolist())]


def _moves(
    old: tuple[NDArray[np.int64], NDArray[np.int64]],
    new: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> dict[tuple[str, str], int]:
    """How many keys changed their tier, by the tiers before and after."""
    # A key's number in base 3: the tier after, the tier before.
    chosen = [*old, *new]
    digits = [np.full(len(keys), digit) for keys, digit in zip(chosen, (1, 2, 3, 6), strict=True)]
    _, numbers = add_counts(chosen, digits)
    counts = np.bincount(numbers.astype(np.int64), minlength=9)
    return {
        (old_tier, new_tier): int(count)
        for (new_tier, old_tier), count in zip(product(_TIERS, _TIERS), counts, strict=True)
        if count and old_tier != new_tier
    }

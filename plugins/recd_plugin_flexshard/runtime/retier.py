"""Re-tiering: the tiers' rows are chosen anew from the accesses of the last steps, over all ranks.

The key of a row is that of ``TierIndex``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

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

Keys = NDArray[np.int64]


class RecentAccesses:
    """Counts of this rank since the last ``take``.

    Exact while at most ``bound`` rows were read; beyond it the heaviest are kept, and a count is
    too low by less than a share ``1 / bound`` of all accesses.
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
    """The rows of the overlays, and what they would have been worth in the last steps."""

    hot: Keys
    flex: Keys
    accesses: float
    covered_before: float
    covered_after: float


def choose_rows(
    read: tuple[Keys, NDArray[np.float64]], hot: Keys, flex: Keys, group: dist.ProcessGroup
) -> Chosen:
    """The most read rows become hot, the next ones flex, as many of each as now.

    Of rows that were read equally often those that are hot stay before those that are flex, and
    these before others: nothing moves without a reason. A collective call, and the result is the
    same on all ranks.
    """
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, read, group=group)
    chosen = np.concatenate([hot, flex])
    every, times = zip(*of_ranks, (chosen, np.zeros(len(chosen))), strict=True)
    keys, counts = add_counts(list(every), list(times))
    tiers = np.full(len(keys), 2)
    tiers[np.searchsorted(keys, hot)] = 0
    tiers[np.searchsorted(keys, flex)] = 1
    best = np.lexsort((keys, tiers, -counts))[: len(chosen)]
    return Chosen(
        keys[best[: len(hot)]],
        keys[best[len(hot) :]],
        float(counts.sum()),
        float(counts[tiers < 2].sum()),
        float(counts[best].sum()),
    )


@dataclass(frozen=True)
class RetierReport:
    """What a new choice of rows changed, in all tables of a collection."""

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
        chosen = choose_rows(self._recent.take(), *old, self._group)
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

"""Re-tiering: chooses new rows to copy to ranks and nodes from recent lookups."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from recd_plugin_flexshard.runtime.collection import RowTiers
from recd_plugin_flexshard.runtime.split import TierIndex, TierSplit
from recd_plugins.api import access

_logger = logging.getLogger(__name__)

Keys = NDArray[np.int64]


class RecentAccesses:
    """Counts how often this rank looked up each row since the last ``take``.

    A row's key is its index in the concatenation of all tables. Counts are exact for up to
    ``bound`` rows. With more rows, only the most frequent rows are kept, and a count may be too low
    by less than ``1 / bound`` of all lookups.
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
        """Add 1 to the count of each element of ``keys``, int64 ``[n]``."""
        self._uncounted.append(keys)
        self._num_uncounted += keys.numel()
        if self._num_uncounted >= self._bound:
            self._count()

    def take(self) -> tuple[Keys, NDArray[np.float64]]:
        """Return the keys of looked-up rows, ascending, and their counts. Reset all counts."""
        self._count()
        taken = self._keys, self._counts
        self._forget()
        return taken

    def _count(self) -> None:
        if not self._uncounted:
            return
        keys, counts = torch.unique(torch.cat(self._uncounted), return_counts=True)
        new, times = keys.cpu().numpy(), counts.cpu().numpy().astype(np.float64)
        self._keys, self._counts, _ = access.keep_most_read(
            *access.add_counts([self._keys, new], [self._counts, times]), self._bound
        )
        self._uncounted, self._num_uncounted = [], 0


@dataclass(frozen=True)
class Chosen:
    """New choice of hot rows (copied to every rank) and flex rows (copied to every node).

    Attributes:
        hot, flex: keys of the new hot and of the new flex rows, int64.
        moved: number of rows that become hot, flex or cold.
        accesses: number of recent lookups.
        covered_before: number of recent lookups of the previous hot and flex rows.
        covered_after: number of recent lookups of the new hot and flex rows.
    """

    hot: Keys
    flex: Keys
    moved: int
    accesses: float
    covered_before: float
    covered_after: float


def choose_rows(
    read: tuple[Keys, NDArray[np.float64]], hot: Keys, flex: Keys, group: dist.ProcessGroup
) -> Chosen:
    """Choose the most read rows as hot rows (copied to every rank), the next ones as flex rows.

    Flex rows are copied to every node. This is a collective call with the same result on all ranks.
    The numbers of hot and flex rows stay the same.

    Args:
        read: keys of the rows read by this rank, and their counts.
        hot, flex: keys of the current hot and flex rows.
        group: process group of the ranks.
    """
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, read, group=group)
    chosen = np.concatenate([hot, flex])
    every, times = zip(*of_ranks, (chosen, np.zeros(len(chosen))), strict=True)
    keys, counts = access.add_counts(list(every), list(times))
    tiers = np.full(len(keys), 2)
    tiers[np.searchsorted(keys, hot)] = 0
    tiers[np.searchsorted(keys, flex)] = 1
    best = np.lexsort((keys, tiers, -counts))[: len(chosen)]
    after = np.full(len(keys), 2)
    after[best] = np.repeat([0, 1], [len(hot), len(flex)])
    return Chosen(
        keys[best[: len(hot)]],
        keys[best[len(hot) :]],
        int((after != tiers).sum()),
        float(counts.sum()),
        float(counts[tiers < 2].sum()),
        float(counts[best].sum()),
    )


@dataclass(frozen=True)
class RetierReport:
    """Result of one re-tiering, a new choice of the rows to copy to ranks and nodes.

    Attributes:
        step: number of steps before the re-tiering.
        moved: number of rows whose copies were created, removed or moved.
        a2a_share_before, a2a_share_after: fraction of recent lookups that needs the all-to-all over
            all ranks, with the previous and with the new rows.
    """

    step: int
    moved: int
    a2a_share_before: float
    a2a_share_after: float

    def __str__(self) -> str:
        return (
            f"flexshard chose new rows to copy after step {self.step}. {self.moved:,} rows moved. "
            f"All-to-all lookups: {self.a2a_share_before:.1%} -> {self.a2a_share_after:.1%}"
        )


class Retiering:
    """Counts lookups during training, and chooses new rows to copy every ``every`` batches.

    The total number of copied rows stays the same, but the number for each table may change.
    """

    def __init__(self, every: int) -> None:
        # The bytes of other process groups are reported as traffic of training steps.
        world = dist.group.WORLD
        assert world is not None
        self.reports: list[RetierReport] = []
        self._every = every
        self._group = world
        self._steps = 0
        self._recent = RecentAccesses()

    def next_index(self, index: TierIndex) -> TierIndex:
        """Return the index of copied rows for the next training batch.

        The index changes after every ``every`` batches. This is a collective call.
        """
        if not self._steps or self._steps % self._every:
            return index
        chosen = choose_rows(self._recent.take(), *index.chosen_keys(), self._group)
        accesses = max(chosen.accesses, 1.0)
        before, after = chosen.covered_before / accesses, chosen.covered_after / accesses
        self.reports.append(RetierReport(self._steps, chosen.moved, 1 - before, 1 - after))
        if self._group.rank() == 0:
            _logger.info("%s", self.reports[-1])
        if not chosen.moved:
            return index
        hot, flex = (_rows_by_table(keys, index.first_keys) for keys in (chosen.hot, chosen.flex))
        tiers = {table: RowTiers(hot[n], flex[n]) for n, table in enumerate(index.tiers)}
        return replace(index, tiers=tiers)

    def count(self, split: TierSplit) -> None:
        """Count the lookups of a training batch."""
        self._steps += 1
        self._recent.add(split.index.keys(split.ids, split.lengths))


def _rows_by_table(keys: Keys, first_keys: Keys) -> list[Keys]:
    """Split keys by table, and convert them to row numbers in the table."""
    tables = np.searchsorted(first_keys, keys, side="right") - 1
    return [keys[tables == number] - first for number, first in enumerate(first_keys.tolist())]

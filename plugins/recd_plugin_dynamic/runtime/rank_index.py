"""The part of a dynamic table's index that belongs to one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recd_plugin_dynamic.index.mix import bucket_width, mix, unmix
from recd_plugin_dynamic.table import DynamicTable
from recd_plugins.api import unique_ids

_BITS = 24  # of a random float32 in [0, 1)


class Shard(NamedTuple):
    """Access to this rank's rows of a table.

    Attributes:
        write: function (rows of the shard, weights ``[n, dim]``) that overwrites rows and sets
            their optimizer state to zero.
        dim: number of columns.
        first_row: row of the table that is row 0 of the shard.
        bounds: lowest and highest initial weight.
    """

    write: Callable[[Tensor, Tensor], None]
    dim: int
    first_row: int
    bounds: tuple[float, float]

    def reset(self, rows: Tensor, step: int) -> None:
        """Draw initial weights for rows of the whole table, seeded by row and step."""
        places = rows[:, None] * self.dim + torch.arange(self.dim)
        drawn = mix(mix(places) ^ step) >> (63 - _BITS)
        low, high = self.bounds
        values = drawn.to(torch.float32) * (2.0**-_BITS * (high - low)) + low
        self.write(rows - self.first_row, values)


class RankIndex:
    """The buckets of a dynamic table that a rank owns.

    Args:
        table: layout of the whole table.
        rank: this rank.
        world_size: number of ranks; divides the number of buckets.
    """

    def __init__(self, table: DynamicTable, rank: int, world_size: int) -> None:
        buckets = table.num_buckets // world_size
        first = rank * buckets
        self._index = table.index(first, first + buckets)
        self._first_id = first * bucket_width(table.num_buckets)
        arrays = {name: torch.from_numpy(each) for name, each in self._index.state().items()}
        self._state = {
            # State with one entry per row of the table is saved with the row.
            name: each if name.startswith("candidate_") else each.flatten()
            for name, each in arrays.items()
        }
        # One number per bucket, because state dicts split tensors by buckets.
        self._steps = self._state["steps"] = torch.zeros(buckets, dtype=torch.int64)
        #: Whether tensors of ``state()`` were changed.
        self.loaded = False
        #: Called with rows whose weights or index entries were changed here, int64 ``[n]``.
        self.changed: Callable[[Tensor], None] = lambda _: None
        #: Called with evicted ids, int64 ``[n]``, and the number of the step.
        self.on_eviction: Callable[[NDArray[np.int64], int], None] = lambda *_: None
        self._counts = {"inserted": 0, "evicted": 0, "not_admitted": 0}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the index, in the order of buckets. They share its memory."""
        return self._state

    def counts(self) -> dict[str, int]:
        """Return the number of ids with a row, and of ids inserted, evicted and not admitted.

        The last three count from the start of the run. In each step, an id of the batch that gets
        no row counts once as not admitted.
        """
        return {"ids": len(self._index), **self._counts}

    def rows(self, ids: Tensor, shard: Shard, *, training: bool) -> Tensor:
        """Return the row of this rank's shard for each id, int64 ``[n]``.

        In training, new ids get rows, and rows of evicted ids get new initial weights. Ids without
        a row share row 0, whose weights are set to zero.

        Args:
            ids: mixed ids minus the first mixed id of this rank, int64 ``[n]``, with duplicates.
            shard: this rank's rows of the table.
            training: whether to insert new ids.
        """
        if self.loaded:
            self._index.load_state(self._index.state())
            self.loaded = False
        unique = unique_ids(ids.cpu(), [len(ids)])
        distinct = unmix(unique.ids + self._first_id).numpy()
        if training:
            self._steps += 1
            step = int(self._steps[0])
            assigned = self._index.find_or_insert(distinct, None, step)
            found = assigned.rows
            self._counts["inserted"] += len(assigned.new)
            self._counts["evicted"] += len(assigned.evicted_ids)
            self._counts["not_admitted"] += int((found < 0).sum())
            evicted = torch.from_numpy(assigned.evicted_rows)
            if len(evicted):
                shard.reset(evicted, step)
                self.on_eviction(assigned.evicted_ids, step)
            # The index changes without a gradient, too.
            self.changed(torch.cat([torch.from_numpy(found), evicted]))
        else:
            found = self._index.find(distinct)
        rows = torch.from_numpy(found).sub_(shard.first_row).clamp_(min=0)
        if bool((rows == 0).any()):
            shard.write(torch.tensor([0]), torch.zeros(1, shard.dim))
            self.changed(torch.tensor([shard.first_row]))
        return rows[unique.inverse].to(ids.device)

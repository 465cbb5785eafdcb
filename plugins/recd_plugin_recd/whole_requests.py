"""Dataset wrapper ``recd.whole_requests``: batches of whole requests, with equal work per rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from heapq import heapreplace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray
from pydantic import Field

from recd_plugins.api import (
    DataError,
    DatasetWrapper,
    PluginOptions,
    Reader,
    Rows,
    SetupError,
    Split,
    row_tables,
)

State = dict[str, Any]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

_ID_BYTES = 8

_logger = logging.getLogger(__name__)


class WholeRequests(DatasetWrapper):
    """Keeps each request in one batch, and balances the cost of requests between ranks.

    A request is a run of rows with the same request column, or else session column. Each step
    divides the requests of all ranks anew, which changes its loss only by floating-point rounding.
    (If labels are missing, the mean over each rank's labelled rows depends on the division.)
    Batches of ranks differ in size, also from ``batch_size``, which is their mean, so training
    weights losses by the number of rows. Each rank reads the rows of all ranks. Requests larger
    than a batch are cut. Rank 0 logs the number of cuts after an epoch.
    """

    name = "recd.whole_requests"
    uneven_batches = True

    class Options(PluginOptions):
        """Options of the plugin ``recd.whole_requests``."""

        row_cost: float = Field(
            default=4.0,
            ge=0,
            description="Cost of a row with its candidate features, relative to the lookup of one "
            "id.",
        )
        attention_cost: float = Field(
            default=0.0,
            ge=0,
            description="Cost of attention from one row to one id of a sequence feature, relative "
            "to the lookup of one id. Set it for target attention, for example to 0.1.",
        )

    options: Options

    def prepare(self) -> None:
        super().prepare()
        if self.inner.session_keys() is None:
            raise SetupError(
                f"{self.name}: dataset {self.inner.name!r} has no session or request column. Name "
                "one in its options, or remove this wrapper."
            )

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        if split == "train":
            return RequestReader(self, rank, world_size, batch_size)
        return self.inner.reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split=split
        )

    def sample(self, batch_size: int) -> Reader:
        return RequestReader(self, 0, 1, batch_size, warns=False)

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        if split == "train":
            return RequestReader(self, rank, world_size, batch_size, with_keys=True)
        return self.inner.session_reader(
            rank=rank, world_size=world_size, batch_size=batch_size, split=split
        )

    def costs(self, rows: Rows, starts: Int64s) -> Float64s:
        """Return the cost of each request in id lookups, float64 ``[num_requests]``.

        The cost is ``row_cost`` per row, plus the length of each feature's longest list, because
        user features are looked up once per request. Each id of a sequence feature, counted in all
        rows, adds ``attention_cost``. ``starts`` has the first row of each request.
        """
        costs = self.options.row_cost * np.diff(starts, append=len(rows))
        tables = self.lookups.tables if self.options.attention_cost else ()
        sequences = {name for table in tables if not table.pooled for name in table.features}
        for name in self.schema().sparse:
            lengths = _lengths(rows.data.column(name))
            costs += np.maximum.reduceat(lengths, starts)
            if name in sequences:
                costs += self.options.attention_cost * np.add.reduceat(lengths, starts)
        return costs


def _lengths(column: pa.Array) -> Float64s:
    """Return the number of ids in each row, float64 ``[num_rows]``."""
    if pt.is_dictionary(column.type):  # layout list_dict
        sizes = pc.binary_length(column.dictionary).to_numpy(zero_copy_only=False)
        return sizes[column.indices.to_numpy()] / _ID_BYTES
    if pt.is_integer(column.type):
        return np.ones(len(column))
    return pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.float64)


class RequestReader(Reader):
    """Reads the batches of all ranks, and yields this rank's share of whole requests.

    A request that continues in the next batch is carried over to the next step. A checkpoint stores
    the number of rows that each rank's stream carried over.

    Args:
        dataset: the wrapper, whose inner dataset is read.
        rank, world_size: rank of this process and number of ranks.
        batch_size: rows per batch of the inner dataset.
        with_keys: whether to keep the session and request columns.
        warns: whether rank 0 logs the number of cut requests after an epoch.
    """

    def __init__(
        self,
        dataset: WholeRequests,
        rank: int,
        world_size: int,
        batch_size: int,
        *,
        with_keys: bool = False,
        warns: bool = True,
    ) -> None:
        keys = dataset.session_keys()
        assert keys is not None, "prepare() checks it"
        self._dataset, self._request = dataset, keys.group
        self._left_out = frozenset[str]() if with_keys else keys.groups
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._warns = warns
        self._inner = self._open(rank, world_size)
        self._position: State = {"inner": self._inner.state_dict(), "carried": None}

    def _open(self, rank: int, world_size: int) -> Reader:
        return self._dataset.inner.session_reader(
            rank=rank, world_size=world_size, batch_size=self._batch_size, split="train"
        )

    def __len__(self) -> int:
        return len(self._inner)

    def num_left(self) -> int | None:
        self._inner.load_state_dict(self._position["inner"])
        return self._inner.num_left()

    def state_dict(self) -> State:
        return dict(self._position)

    def load_state_dict(self, state: State) -> None:
        if "carried" not in state:
            raise DataError(
                "recd.whole_requests: the checkpoint was saved with other dataset wrappers. "
                "Restore the previous wrap: section of the dataset, or start a new run."
            )
        self._inner.load_state_dict(state["inner"])
        self._position = dict(state)

    def __iter__(self) -> Iterator[Rows]:
        streams = [self._open(rank, self._world_size) for rank in range(self._world_size)]
        before = self._position["inner"]
        for stream in streams:
            stream.load_state_dict(before)
        batches = zip(*streams, strict=True)
        carried, num_cut = self._carried_rows(), 0
        step = next(batches, None)
        while step is not None:
            after = streams[0].state_dict()
            following = next(batches, None)
            parts = [*step]
            if len(carried) == len(step):
                pairs = zip(carried, step, strict=True)
                parts = [row_tables.concat_rows([*filter(len, pair)]) for pair in pairs]
            else:  # saved with another number of ranks
                parts += carried
            carried = []
            for n, batch in enumerate(following or ()):
                rows = parts[n]
                kept = self._num_whole(rows, batch)
                if not kept:
                    kept, num_cut = len(rows), num_cut + 1
                parts[n] = row_tables.slice_rows(rows, 0, kept)
                carried.append(row_tables.slice_rows(rows, kept, len(rows) - kept))
            mine = self._deal([*filter(len, parts)])
            counts = [len(rows) for rows in carried]
            saved = [before, self._world_size, counts] if any(counts) else None
            self._position = {"inner": after, "carried": saved}
            yield mine
            before, step = after, following
        self._position = {"inner": streams[0].state_dict(), "carried": None}
        if num_cut and self._warns and self._rank == 0:
            _logger.warning(
                "%s: requests with more rows than a batch were cut %d times in an epoch. To keep "
                "them whole, raise training.batch_size (now %d)",
                self._dataset.name,
                num_cut,
                self._batch_size,
            )

    def _carried_rows(self) -> list[Rows]:
        """Read again the rows that were carried over at the current position."""
        if self._position["carried"] is None:
            return []
        before, world_size, counts = self._position["carried"]
        found = []
        for rank, count in enumerate(counts):
            reader = self._open(rank, world_size)
            reader.load_state_dict(before)
            rows = next(iter(reader))
            found.append(row_tables.slice_rows(rows, len(rows) - count, count))
        return found

    def _num_whole(self, rows: Rows, following: Rows) -> int:
        """Return the number of rows without the last request, if ``following`` continues it."""
        column = rows.data.column(self._request)
        if column[-1].as_py() != following.data.column(self._request)[0].as_py():
            return len(rows)
        return int(self._starts(rows)[-1])

    def _starts(self, rows: Rows) -> Int64s:
        """Return the index of the first row of each request, int64 ``[num_requests]``."""
        column = rows.data.column(self._request)
        changes = pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        return np.concatenate(([0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1))

    def _deal(self, parts: list[Rows]) -> Rows:
        """Divide the rows of all ranks by the cost of requests. Return the rows of this rank."""
        requests = []  # cost, part, first row, number of rows
        for n, rows in enumerate(parts):
            starts = self._starts(rows)
            costs = self._dataset.costs(rows, starts).tolist()
            for cost, (start, end) in zip(costs, pairwise([*starts, len(rows)]), strict=True):
                requests.append((cost, n, start, end - start))
        while len(requests) < self._world_size:
            cost, n, start, size = longest = max(requests, key=itemgetter(3))
            requests.remove(longest)
            half = size // 2
            requests += [(cost / 2, n, start, half), (cost / 2, n, start + half, size - half)]
        loads = [(0.0, rank) for rank in range(self._world_size)]
        mine = []
        for cost, *request in sorted(requests, key=lambda request: -request[0]):
            load, rank = loads[0]
            heapreplace(loads, (load + cost, rank))
            if rank == self._rank:
                mine.append(request)
        rows = row_tables.concat_rows(
            [row_tables.slice_rows(parts[n], start, size) for n, start, size in sorted(mine)]
        )
        names = [name for name in rows.data.schema.names if name not in self._left_out]
        return Rows(rows.data.select(names), rows.origins)

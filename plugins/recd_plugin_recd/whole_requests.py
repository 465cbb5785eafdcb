"""Dataset wrapper ``recd.whole_requests``: batches of whole requests, with equal work per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import pyarrow.compute as pc
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
)

State = dict[str, Any]
Int64s = NDArray[np.int64]

_STATE_VERSION = 1


class WholeRequests(DatasetWrapper):
    """Keeps each request in one batch, and balances the cost of requests between ranks.

    A request is a run of rows with the same session. A step trains on the requests of all ranks'
    batches of the wrapped dataset, so its loss is equal up to floating-point rounding. The batches
    of ranks differ in size. Training weights their losses by the number of rows. Each rank reads
    the rows of all ranks.
    """

    name = "recd.whole_requests"
    uneven_batches = True

    class Options(PluginOptions):
        """Options of the plugin ``recd.whole_requests``."""

        row_cost: float = Field(
            default=4.0, ge=0, description="Cost of a row, relative to the lookup of one id."
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
        return self._reader(rank, world_size, batch_size, split, with_session=False)

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        return self._reader(rank, world_size, batch_size, split, with_session=True)

    def _reader(
        self, rank: int, world_size: int, batch_size: int, split: Split, *, with_session: bool
    ) -> Reader:
        if split != "train":
            read = self.inner.session_reader if with_session else self.inner.reader
            return read(rank=rank, world_size=world_size, batch_size=batch_size, split=split)
        keys = self.inner.session_keys()
        assert keys is not None, "prepare() checks it"
        return RequestReader(
            lambda rank, world_size: self.inner.session_reader(
                rank=rank, world_size=world_size, batch_size=batch_size, split=split
            ),
            self._cost,
            keys.session,
            with_session=with_session,
            rank=rank,
            world_size=world_size,
        )

    def _cost(self, rows: Rows) -> NDArray[np.float64]:
        """Return the cost of each row, float64 ``[num_rows]``. Repeated lists cost nothing."""
        from recd_plugins.api import arrow, dedup

        names = self.schema().sparse
        unique = dedup.Deduplicator(neighbours_only=True)(
            [[arrow.sparse_column(rows, name)] for name in names], len(rows)
        )
        cost = np.full(len(rows), self.options.row_cost)
        sequences = self._sequences() if self.options.attention_cost else frozenset()
        for name, each in zip(names, unique, strict=True):
            first = np.diff(each.inverse_lookup, prepend=-1) > 0
            cost[first] += each.lengths
            if name in sequences:
                cost += self.options.attention_cost * each.lengths[each.inverse_lookup]
        return cost

    def _sequences(self) -> frozenset[str]:
        tables = self.lookups.tables
        return frozenset(name for table in tables if not table.pooled for name in table.features)


class RequestReader(Reader):
    """Reads the batches of all ranks, and yields this rank's share of whole requests.

    A request that continues in the next batch is carried over to the next step. A checkpoint stores
    the number of rows that each rank's stream carried over.

    Args:
        open_inner: function that opens a reader of the wrapped dataset, with the session column.
            Its arguments are a rank and the world size.
        cost: function that returns the cost of each row.
        session: name of the session column.
        with_session: whether to keep the session column.
        rank, world_size: rank of this process and number of ranks.
    """

    def __init__(
        self,
        open_inner: Callable[[int, int], Reader],
        cost: Callable[[Rows], NDArray[np.float64]],
        session: str,
        *,
        with_session: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self._open, self._cost = open_inner, cost
        self._session, self._with_session = session, with_session
        self._rank, self._world_size = rank, world_size
        self._inner = open_inner(rank, world_size)
        self._position: State = self._at(self._inner.state_dict())

    def __len__(self) -> int:
        return len(self._inner)

    def num_left(self) -> int | None:
        self._inner.load_state_dict(self._position["inner"])
        return self._inner.num_left()

    def state_dict(self) -> State:
        return dict(self._position)

    def load_state_dict(self, state: State) -> None:
        if state.get("version") != _STATE_VERSION or "carried" not in state:
            raise DataError(
                "recd.whole_requests: the checkpoint was saved with other dataset wrappers. "
                "Restore the previous wrap: section of the dataset, or start a new run."
            )
        self._inner.load_state_dict(state["inner"])
        self._position = dict(state)

    def __iter__(self) -> Iterator[Rows]:
        from recd_plugins.api import row_tables

        streams = [self._open(rank, self._world_size) for rank in range(self._world_size)]
        position = self._position
        for stream in streams:
            stream.load_state_dict(position["inner"])
        batches = zip(*streams, strict=True)
        carried = self._carried_rows(position)
        before, step = position["inner"], next(batches, None)
        while step is not None:
            after = streams[0].state_dict()
            following = next(batches, None)
            if len(carried) == len(step):
                parts = [_joined(pair) for pair in zip(carried, step, strict=True)]
            else:  # saved with another number of ranks
                parts = [*step, *carried]
            carried = []
            for n, batch in enumerate(following or ()):
                rows, kept = parts[n], self._whole(parts[n], batch)
                parts[n] = row_tables.slice_rows(rows, 0, kept)
                carried.append(row_tables.slice_rows(rows, kept, len(rows) - kept))
            mine = self._deal([rows for rows in parts if len(rows)])
            self._position = self._at(after, before, [len(rows) for rows in carried])
            yield mine
            before, step = after, following
        self._position = self._at(streams[0].state_dict())

    def _at(self, inner: State, before: State | None = None, carried: Sequence[int] = ()) -> State:
        state: State = {"version": _STATE_VERSION, "inner": inner, "carried": None}
        if any(carried):
            state["carried"] = [before, self._world_size, list(carried)]
        return state

    def _carried_rows(self, position: State) -> list[Rows]:
        """Read again the rows that were carried over at ``position``."""
        from recd_plugins.api import row_tables

        if position["carried"] is None:
            return []
        before, world_size, counts = position["carried"]
        found = []
        for rank, count in enumerate(counts):
            reader = self._open(rank, world_size)
            reader.load_state_dict(before)
            rows = next(iter(reader))
            found.append(row_tables.slice_rows(rows, len(rows) - count, count))
        return found

    def _whole(self, rows: Rows, following: Rows) -> int:
        """Return the number of rows without a last request that continues in ``following``."""
        column = rows.data.column(self._session)
        if column[-1].as_py() != following.data.column(self._session)[0].as_py():
            return len(rows)
        return int(self._starts(rows)[-1]) or len(rows)

    def _starts(self, rows: Rows) -> Int64s:
        """Return the index of the first row of each request, int64 ``[num_requests]``."""
        column = rows.data.column(self._session)
        changes = pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        return np.concatenate(([0], np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1))

    def _deal(self, parts: list[Rows]) -> Rows:
        """Return the rows of this rank's requests, given the rows of all ranks."""
        from recd_plugins.api import row_tables

        rows = row_tables.concat_rows(parts)
        firsts = np.cumsum([0, *map(len, parts)])[:-1]
        starts = np.concatenate(
            [first + self._starts(part) for first, part in zip(firsts, parts, strict=True)]
        )
        while len(starts) < self._world_size:  # split the largest request
            sizes = np.diff(starts, append=len(rows))
            largest = int(sizes.argmax())
            starts = np.insert(starts, largest + 1, starts[largest] + sizes[largest] // 2)
        costs = np.add.reduceat(self._cost(rows), starts)
        loads = [(0.0, rank) for rank in range(self._world_size)]
        heapify(loads)
        chosen = []
        for request in np.argsort(-costs, kind="stable").tolist():
            load, rank = heappop(loads)
            heappush(loads, (load + float(costs[request]), rank))
            if rank == self._rank:
                chosen.append(request)
        ends = np.append(starts[1:], len(rows))
        if not self._with_session:
            names = [name for name in rows.data.schema.names if name != self._session]
            rows = Rows(rows.data.select(names), rows.origins)
        return row_tables.concat_rows(
            [
                row_tables.slice_rows(rows, int(starts[n]), int(ends[n] - starts[n]))
                for n in sorted(chosen)
            ]
        )


def _joined(parts: Sequence[Rows]) -> Rows:
    from recd_plugins.api import row_tables

    return row_tables.concat_rows([rows for rows in parts if len(rows)])

"""Rows in parts, in memory while they fit and in files when they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator, model_validator

from recd_plugin_tables.columns import ColumnOptions, Unit
from recd_plugin_tables.kinds import list_parts
from recd_plugin_tables.plan import CANDIDATE, REQUEST, ROW, SESSION, TIME
from recd_plugin_tables.times import Cells, microseconds
from recd_plugin_tables.values import mixed
from recd_plugins.api import DataError, PluginOptions, why_not

# Sessions go by the highest bits of their hash to one of 2^6 parts.
_BITS = 6
#: Rows that are sorted and handed on at once.
_ROWS = 16_384


class Spill:
    """Rows that are added in any order and come back sorted, or as they were added.

    Sessions come in the order of a hash, which no table has beforehand: the same in every run, and
    as good as drawn. The rows of one go by time, then by request, and then as they were added.

    Args:
        folder: for what does not fit into memory.
        schema: of the rows.
        memory: bytes that may stay in memory. A part, 1/64 of the rows, is sorted in memory.
        order: "session", "row" for the order of the table, or "added" to keep the order.
        num_rows: of the table; needed for "row".
        histories: to build by session, by name; needs the order "session".
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        memory: int,
        *,
        order: Literal["session", "row", "added"],
        num_rows: int = 0,
        histories: Mapping[str, HistoryOptions] | None = None,
    ) -> None:
        self._folder, self._schema, self._memory = folder, schema, memory
        self._order, self._num_rows, self._histories = order, num_rows, histories or {}
        self._waiting: list[list[pa.RecordBatch]] = [[] for _ in range(1 << _BITS)]
        self._writers: dict[int, ipc.RecordBatchFileWriter] = {}
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        if not batch.num_rows:
            return
        if self._order == "added":
            self._waiting[0].append(batch)
        else:
            parts = self._parts(batch)
            order = np.argsort(parts, kind="stable")
            batch = batch.take(pa.array(order))
            ends = np.searchsorted(parts[order], np.arange(1, (1 << _BITS) + 1))
            start = 0
            for part, end in enumerate(ends.tolist()):
                if end > start:
                    self._waiting[part].append(batch.slice(start, end - start))
                start = end
        self._bytes += batch.nbytes
        if self._bytes > self._memory:
            self._write()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """All rows in their order, once."""
        for part in range(1 << _BITS):
            batches = self._read(part)
            if self._order == "added":
                yield from batches
                continue
            table = pa.Table.from_batches(batches, self._schema).combine_chunks()
            order = _sorted(table, self._order)
            histories = None
            if self._histories:
                used = [SESSION, TIME, ROW, *(each.of for each in self._histories.values())]
                in_order = table.select(dict.fromkeys(used)).take(pa.array(order))
                histories = Histories(in_order, self._histories)
            for start in range(0, len(order), _ROWS):
                taken = table.take(pa.array(order[start : start + _ROWS]))
                if histories is not None:
                    taken = histories.add_to(taken, start)
                yield from taken.combine_chunks().to_batches()

    def _parts(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        if self._order == "row":
            return (batch[ROW].to_numpy() << _BITS) // self._num_rows
        return (_order_of(batch[SESSION]) >> np.uint64(64 - _BITS)).astype(np.int64)

    def _read(self, part: int) -> Iterator[pa.RecordBatch]:
        if part in self._writers:
            self._writers.pop(part).close()
            path = self._folder / f"{part}.arrow"
            with pa.OSFile(str(path)) as file:
                reader = ipc.open_file(file)
                yield from (reader.get_batch(n) for n in range(reader.num_record_batches))
            path.unlink()
        waiting, self._waiting[part] = self._waiting[part], []
        yield from waiting

    def _write(self) -> None:
        for part, batches in enumerate(self._waiting):
            path = self._folder / f"{part}.arrow"
            try:
                for batch in (
                    pa.Table.from_batches(batches, self._schema).combine_chunks().to_batches()
                ):
                    if part not in self._writers:
                        self._folder.mkdir(parents=True, exist_ok=True)
                        options = ipc.IpcWriteOptions(compression="lz4")
                        self._writers[part] = ipc.new_file(path, self._schema, options=options)
                    self._writers[part].write_batch(batch)
            except OSError as error:
                raise DataError(f"{path}: cannot be written ({why_not(error, path)})") from error
            batches.clear()
        self._bytes = 0


def _sorted(table: pa.Table, order: str) -> NDArray[np.int64]:
    if order == "row":
        return np.lexsort([table[name].to_numpy() for name in (CANDIDATE, ROW)])
    keys = [table[name].to_numpy() for name in (CANDIDATE, ROW, REQUEST, TIME)]
    return np.lexsort((*keys, _order_of(table[SESSION])))


def _order_of(sessions: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    return mixed(sessions.to_numpy())


class HistoryOptions(PluginOptions):
    """A feature that lists the ids of a column in earlier rows of the session."""

    of: str = Field(description="Column of the ids; columns uses it as id.")
    last: PositiveInt = Field(
        default=50, description="Maximum number of rows; the latest are kept."
    )
    ties: Literal["apart", "stored"] = Field(
        default="apart",
        description="Rows of a session with equal times. apart: neither is in the history of the "
        "other. stored: the row that comes first in the table is the earlier one.",
    )


class Histories:
    """Builds the histories of rows that are sorted by session and time.

    Args:
        rows: all rows of each session in it, with the columns of the import.
        options: histories by name; ``of`` is the name of a feature here.
    """

    def __init__(self, rows: pa.Table, options: Mapping[str, HistoryOptions]) -> None:
        session, time, row = (rows[name].to_numpy() for name in (SESSION, TIME, ROW))
        new_session = _changes(session)
        # Candidates of one row of the table are never in each other's history.
        later = {"apart": _changes(time), "stored": _changes(row)}
        self._spans: dict[str, tuple[pa.Array, NDArray[np.int32], NDArray[np.int32]]] = {}
        for name, option in options.items():
            offsets, ids, _ = list_parts(rows[option.of].combine_chunks())
            stops = _last_true(new_session | later[option.ties])
            starts = np.maximum(_last_true(new_session), stops - option.last)
            self._spans[name] = ids, offsets[starts], offsets[stops]

    def add_to(self, rows: pa.Table, first: int) -> pa.Table:
        """Return ``rows`` with their histories; the first of them is row ``first`` of all."""
        for name, (ids, starts, stops) in self._spans.items():
            begin, end = (each[first : first + len(rows)] for each in (starts, stops))
            lengths = end - begin
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            places = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
            lists = pa.ListArray.from_arrays(pa.array(offsets), ids.take(pa.array(places)))
            rows = rows.append_column(name, lists)
        return rows


def _changes(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])


def _last_true(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), 0))


# Times that are kept to find where the test split begins.
_MOST_TIMES = 1 << 22


class SplitOptions(PluginOptions):
    """How rows are split into those for training and those for the test."""

    by: Literal["time", "session", "row"] = Field(
        default="time",
        description="The last ones by time; whole sessions; or rows, those of a request together. "
        "Sessions and rows are drawn by a hash, the same each time.",
    )
    test: float = Field(default=0.1, gt=0, lt=1, description="Share of the test split.")
    test_from: str | int | float | None = Field(
        default=None, description="With by: time, the first time of the test split in its place."
    )

    @field_validator("test_from", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        return str(given) if isinstance(given, date | datetime) else given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.test_from is not None and (self.by != "time" or "test" in self.model_fields_set):
            raise ValueError("test_from is for by: time, in place of test")
        return self


class Splitter:
    """Sees all rows, and then says of each whether it is of the test split.

    Args:
        options: how; None makes no test split.
        unit: of the table's times, where they are numbers.
    """

    def __init__(self, options: SplitOptions | None, unit: Unit | None) -> None:
        self._options = options
        self._salt = 1
        self._times: list[NDArray[np.int64]] = []
        self._num_times, self._level = 0, 0
        self._cut: int | None = None
        if options is not None and options.test_from is not None:
            self._cut = _time(options.test_from, unit)

    def see(self, batch: pa.RecordBatch) -> None:
        """Rows, in any order; all of them before ``test_rows`` is asked."""
        if self._options is None or self._options.by != "time" or self._cut is not None:
            return
        times = np.stack([batch[TIME].to_numpy(), batch[ROW].to_numpy()])
        self._times.append(self._thinned(times))
        self._num_times += self._times[-1].shape[1]
        while self._num_times > _MOST_TIMES:
            self._level += 1
            self._times = [self._thinned(np.concatenate(self._times, axis=1))]
            self._num_times = self._times[0].shape[1]

    def test_rows(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows are of the test split, bool ``[B]``."""
        if self._options is None:
            return np.zeros(batch.num_rows, np.bool_)
        if self._options.by == "time":
            if self._cut is None:
                self._cut = self._found_cut(self._options.test)
            return batch[TIME].to_numpy() >= self._cut
        # A row without a request is one of its own.
        key = SESSION if self._options.by == "session" else REQUEST
        share = mixed(batch[key].to_numpy(), self._salt) / 2.0**64
        return share < self._options.test

    def _thinned(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        bits = mixed(times[1]) & np.uint64((1 << self._level) - 1)
        return times[:, bits == 0]

    def _found_cut(self, share: float) -> int:
        if not self._num_times:
            return 0
        times = np.concatenate(self._times, axis=1)[0]
        at = min(len(times) - 1, int(np.ceil(len(times) * (1 - share))))
        return int(np.partition(times, at)[at])


def _time(given: str | float, unit: Unit | None) -> int:
    text = isinstance(given, str)
    values = pa.array([given], pa.string() if text else None)
    cells = Cells(values, lambda _: "option split.test_from")
    use = ColumnOptions.model_validate({"as": "time"})
    found = microseconds(cells, None if text else (unit or use.unit))
    if found[0].as_py() is None:
        raise DataError(f"option split.test_from: {given} is no time")
    return int(found[0].as_py())

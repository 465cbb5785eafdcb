"""Sorts the rows of an import, builds session histories and splits the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from recd_plugin_tables.histories.options import HistoryOptions
from recd_plugin_tables.kinds import Unit, list_parts
from recd_plugin_tables.plan import CANDIDATE, REQUEST, ROW, SESSION, TIME
from recd_plugin_tables.values import Cells, microseconds, mixed
from recd_plugins.api import PluginOptions, Split

# Rows are sorted in 2^6 parts, chosen by the highest bits of their session's hash.
_BITS = 6
# Number of rows in an output batch.
_ROWS = 16_384
# Number of sampled times that determine the start of the test split.
_MOST_TIMES = 1 << 22


class Spill:
    """External sort of rows by session: rows that exceed the memory limit are written to files.

    Sessions are sorted by hash. Rows of a session are sorted by time, request and position.

    Args:
        folder: folder for temporary files.
        schema: schema of the rows.
        memory: maximum bytes of rows in memory. Rows are split into 64 parts, and each part is
            sorted in memory.
        order: "session", "row" for the order of the table, or "added" for no sorting.
        num_rows: rows of the table, for "row".
        histories: histories to build, keyed by feature name, for "session".
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
        """Add rows, in any order."""
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
        """Yield all rows in sorted order. Can be called only once."""
        for part in range(1 << _BITS):
            batches = self._read(part)
            if self._order == "added":
                yield from batches
                continue
            table = pa.Table.from_batches(batches, self._schema).combine_chunks()
            order = _sorted(table, self._order)
            histories = None
            if self._histories:
                used = [SESSION, TIME, ROW, *(str(each.of) for each in self._histories.values())]
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
            table = pa.Table.from_batches(batches, self._schema).combine_chunks()
            for batch in table.to_batches():
                if part not in self._writers:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    path = self._folder / f"{part}.arrow"
                    options = ipc.IpcWriteOptions(compression="lz4")
                    self._writers[part] = ipc.new_file(path, self._schema, options=options)
                self._writers[part].write_batch(batch)
            batches.clear()
        self._bytes = 0


def _sorted(table: pa.Table, order: str) -> NDArray[np.int64]:
    if order == "row":
        return np.lexsort([table[name].to_numpy() for name in (CANDIDATE, ROW)])
    keys = [table[name].to_numpy() for name in (CANDIDATE, ROW, REQUEST, TIME)]
    return np.lexsort((*keys, _order_of(table[SESSION])))


def _order_of(sessions: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    return mixed(sessions.to_numpy())


class Histories:
    """Builds history features from ``rows``: complete sessions, sorted by session and time."""

    def __init__(self, rows: pa.Table, options: Mapping[str, HistoryOptions]) -> None:
        session, time, row = (rows[name].to_numpy() for name in (SESSION, TIME, ROW))
        new_session = _changes(session)
        # Candidates from the same table row never appear in each other's history.
        later = {"apart": _changes(time), "stored": _changes(row)}
        self._spans: dict[str, tuple[pa.Array, NDArray[np.int32], NDArray[np.int32]]] = {}
        for name, option in options.items():
            offsets, ids, _ = list_parts(rows[str(option.of)].combine_chunks())
            stops = _last_true(new_session | later[option.ties])
            starts = np.maximum(_last_true(new_session), stops - option.last)
            self._spans[name] = ids, offsets[starts], offsets[stops]

    def add_to(self, rows: pa.Table, first: int) -> pa.Table:
        """Return ``rows``, a slice of all rows from index ``first``, with history columns."""
        for name, (ids, starts, stops) in self._spans.items():
            offsets, places = ranges(*(each[first : first + len(rows)] for each in (starts, stops)))
            lists = pa.ListArray.from_arrays(pa.array(offsets), ids.take(pa.array(places)))
            rows = rows.append_column(name, lists)
        return rows


def ranges(
    starts: NDArray[Any], stops: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return offsets of lists, int32 ``[B + 1]``, and the concatenated indices of B ranges."""
    lengths = stops - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return offsets, places.astype(np.int64)


def _changes(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])


def _last_true(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), 0))


class SplitOptions(PluginOptions):
    """Options to split rows into training, validation and test rows."""

    by: Literal["time", "session", "row"] = Field(
        default="time",
        description="What to split. time: the latest rows are the test split, and the latest rows "
        "before them the validation split. session: whole sessions. row: rows, keeping each "
        "request together. Sessions and rows are chosen by a hash, so the split is reproducible.",
    )
    test: float = Field(
        default=0.1, ge=0, lt=1, description="Fraction of rows in the test split; 0 for none."
    )
    validation: float = Field(
        default=0,
        ge=0,
        lt=1,
        description="Fraction of rows in the validation split, which training.validation "
        "evaluates; 0 for none.",
    )
    test_from: str | int | float | None = Field(
        default=None, description="For by: time, the start time of the test split. Replaces test."
    )

    @field_validator("test_from", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        return str(given) if isinstance(given, date | datetime) else given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.test_from is not None and self.by != "time":
            raise ValueError(
                f"option 'test_from' needs by: time, but 'by' is {self.by!r}. Set by: time, or "
                "remove 'test_from'"
            )
        if self.test + self.validation >= 1:
            raise ValueError(
                f"options 'test' ({self.test:g}) and 'validation' ({self.validation:g}) leave no "
                "rows for training. Reduce their sum below 1"
            )
        return self

    @property
    def names(self) -> tuple[Split, ...]:
        """Names of the splits that have rows."""
        validation: tuple[Split, ...] = ("validation",) if self.validation else ()
        return ("train", *validation, *(("test",) if self.test or self.test_from else ()))


class Splitter:
    """Assigns rows to splits. Call ``see`` with all rows before ``masks``."""

    def __init__(self, options: SplitOptions | None, unit: Unit | None) -> None:
        self._options = options
        self._times: list[NDArray[np.int64]] = []
        self._num_times, self._level = 0, 0
        self._unit = unit
        self._cuts: tuple[int, int] | None = None

    def see(self, batch: pa.RecordBatch) -> None:
        """Record the times of some rows, in any order."""
        if self._options is None or self._options.by != "time":
            return
        times = np.stack([batch[TIME].to_numpy(), batch[ROW].to_numpy()])
        self._times.append(self._thinned(times))
        self._num_times += self._times[-1].shape[1]
        while self._num_times > _MOST_TIMES:
            self._level += 1
            self._times = [self._thinned(np.concatenate(self._times, axis=1))]
            self._num_times = self._times[0].shape[1]

    def masks(self, batch: pa.RecordBatch) -> dict[Split, NDArray[np.bool_]]:
        """Return a mask of the rows of each split, bool ``[B]``."""
        options = self._options
        if options is None:
            return {"train": np.ones(batch.num_rows, np.bool_)}
        if options.by == "time":
            self._cuts = self._cuts or self._found_cuts(options)
            first, second = self._cuts
            times = batch[TIME].to_numpy()
            in_test, held_out = times >= second, times >= first
        else:
            # A row without a request forms its own request.
            key = SESSION if options.by == "session" else REQUEST
            share = mixed(batch[key].to_numpy(), 1) / 2.0**64
            in_test, held_out = share < options.test, share < options.test + options.validation
        return {"train": ~held_out, "validation": held_out & ~in_test, "test": in_test}

    def _thinned(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        bits = mixed(times[1]) & np.uint64((1 << self._level) - 1)
        return times[:, bits == 0]

    def _found_cuts(self, options: SplitOptions) -> tuple[int, int]:
        """Return the first times of the validation and the test split."""
        times = np.sort(np.concatenate([*(each[0] for each in self._times), np.zeros(0, np.int64)]))
        end = int(np.iinfo(np.int64).max)
        test = _from_end(times, len(times), options.test, end)
        if options.test_from is not None:
            test = _time(options.test_from, self._unit)
        before = times[times < test]
        return _from_end(before, len(times), options.validation, test), test


def _from_end(times: NDArray[np.int64], num_rows: int, share: float, end: int) -> int:
    """Return the time at which the last ``share`` of ``num_rows`` rows starts, ``end`` for 0."""
    if not share or not len(times):
        return end
    at = len(times) - num_rows + int(np.ceil(num_rows * (1 - share)))
    return int(times[min(len(times) - 1, max(0, at))])


def _time(given: str | float, unit: Unit | None) -> int:
    text = isinstance(given, str)
    values = pa.array([given], pa.string() if text else None)
    cells = Cells(values, lambda _: "option 'split.test_from'")
    return int(microseconds(cells, None if text else unit)[0].as_py())

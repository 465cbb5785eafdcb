"""Rows in parts, in memory while they fit and in files when they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from numpy.typing import NDArray

from recd_plugin_tables.imports.histories import Histories, HistoryOptions
from recd_plugin_tables.plan import CANDIDATE, REQUEST, ROW, SESSION, TIME
from recd_plugin_tables.values.hashing import mixed
from recd_plugins.api import DataError, why_not

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
        """Add rows.

        Raises:
            DataError: the disk is full.
        """
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
        """Return the part of each row."""
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

"""Writes sorted ranges as Parquet files, several at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.cluster.arena import Arena
from recd_plugin_recd.cluster.gather import Gather
from recd_plugin_recd.cluster.options import ClusterOptions, Progress
from recd_plugin_recd.cluster.ranges import Range, keys_of
from recd_plugins.api import SessionKeys
from recd_plugins.api.columns import TableWriter, choose_layouts
from recd_plugins.api.tables import Layout, is_id_list


class RangeWriter:
    """Writes ranges to ``folder``; no session is in two files.

    Attributes:
        layouts: of each feature, the same in all files.
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: SessionKeys,
        options: ClusterOptions,
        folder: Path,
        layouts: dict[str, Layout] | None,
    ) -> None:
        self._schema, self._keys, self._options, self._folder = schema, keys, options, folder
        self.layouts = layouts

    def write(self, ranges: list[Range], workers: int, progress: Progress) -> None:
        """Sort and write all ranges and drop them; files that are there are not written again.

        Raises:
            DataError: the disk is full.
        """
        files: list[list[Range]] = []
        for each in ranges:
            if each.goes_on and files:
                files[-1].append(each)
            else:
                files.append([each])
        idle: SimpleQueue[_Sorter] = SimpleQueue()
        for _ in range(workers):
            idle.put(_Sorter(self._schema, self._keys, self._options.row_group_rows))
        undecided = self.layouts is None and self._options.layout != "list"
        if undecided and not self._path(0).exists():
            sorter = idle.get()
            self.layouts = choose_layouts_of(next(sorter.sort(ranges[0])), self._options.layout)
            idle.put(sorter)

        def write_file(number: int, parts: list[Range]) -> None:
            sorter = idle.get()
            try:
                self._write_file(self._path(number), parts, sorter, progress)
            finally:
                idle.put(sorter)

        with ThreadPoolExecutor(workers, "recd-cluster") as pool:
            written = [pool.submit(write_file, *each) for each in enumerate(files)]
            try:
                for one in written:
                    one.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _path(self, number: int) -> Path:
        return self._folder / part_name(number)

    def _write_file(
        self, path: Path, ranges: list[Range], sorter: _Sorter, progress: Progress
    ) -> None:
        if path.exists():
            progress(0, sum(each.num_rows for each in ranges))
        else:
            with table_writer(path, self._schema, self._keys, self._options, self.layouts) as file:
                for each in ranges:
                    for batch in sorter.sort(each):
                        file.write(batch)
                        progress(0, batch.num_rows)
        for each in ranges:
            each.drop()


class _Sorter:
    """Sorts one range after the other in the same memory."""

    def __init__(self, schema: pa.Schema, keys: SessionKeys, row_group_rows: int) -> None:
        self._schema, self._keys, self._row_group_rows = schema, keys, row_group_rows
        self._gathered = Arena()

    def sort(self, part: Range) -> Iterator[pa.RecordBatch]:
        """The rows of a range in order, in the pieces that become row groups."""
        batches = list(part.read(whole=True))
        names = [self._keys.session, self._keys.timestamp]
        keys = keys_of(
            pa.Table.from_batches([batch.select(names) for batch in batches]), self._keys
        )
        order = keys.order()
        gather = Gather(batches, self._schema, self._gathered)
        for start, end in pieces(keys.sessions[order], self._row_group_rows):
            yield gather.take(order[start:end])


def choose_layouts_of(rows: pa.RecordBatch, layout: Layout) -> dict[str, Layout]:
    """The layout of each feature of a table whose first rows these are."""
    features = [field.name for field in rows.schema if is_id_list(field.type)]
    if layout == "list":
        return dict.fromkeys(features, layout)
    return choose_layouts({name: _without_nulls(rows.column(name)) for name in features})


def table_writer(
    path: Path,
    schema: pa.Schema,
    keys: SessionKeys,
    options: ClusterOptions,
    layouts: dict[str, Layout] | None,
) -> TableWriter:
    """The writer of one file of the output."""
    return TableWriter(
        path,
        schema,
        keys=keys,
        layout=options.layout if layouts is None else layouts,
        row_group_rows=options.row_group_rows,
        nulls=options.nulls,
    )


def pieces(sessions: NDArray[Any], most: int) -> Iterator[tuple[int, int]]:
    """Bounds of pieces of whole sessions of at most ``most`` rows; longer sessions are cut."""
    ends = np.append(np.flatnonzero(sessions[1:] != sessions[:-1]) + 1, len(sessions))
    start = 0
    while start < len(sessions):
        last = int(np.searchsorted(ends, start + most, "right")) - 1
        end = int(ends[last]) if last >= 0 and ends[last] > start else start + most
        yield start, end
        start = end


def part_name(number: int) -> str:
    """The name of a file of the output."""
    return f"part-{number:05d}.parquet"


def _without_nulls(lists: Any) -> Any:
    """Empty lists for nulls."""
    return lists.fill_null(pa.scalar([], lists.type)) if lists.null_count else lists

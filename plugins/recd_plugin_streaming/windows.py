"""Windows of rows: the rows that are put in training order together.

Without a grouping column, a window is a chunk of adjacent rows of one partition. With one, a window
has rows of all partitions of the rank, and rows of the same group follow each other. Groups are in
the order of their last row. If the first rows of a window are removed, the remaining rows therefore
keep their order, and a resumed run trains them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_streaming.columns import StreamOptions
from recd_plugin_streaming.ranges import Left, Ranges, joined, runs
from recd_plugin_streaming.source import Chunk


@dataclass(frozen=True)
class Window:
    """Rows of one or more chunks that are put into training order together.

    Attributes:
        rows: the rows in training order.
        partitions: name of the partition of each row, str ``[num_rows]``.
        offsets: offset of each row in its partition, int64 ``[num_rows]``.
        after: dict from each partition to its offset ranges after the window.
    """

    rows: pa.RecordBatch
    partitions: NDArray[np.str_]
    offsets: NDArray[np.int64]
    after: Mapping[str, Ranges]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, rows: slice) -> Window:
        return Window(self.rows[rows], self.partitions[rows], self.offsets[rows], self.after)

    def left(self, partition: str) -> Left:
        """Return the rows of a partition in and after this window."""
        offsets = self.offsets[self.partitions == partition]
        return Left(runs(np.sort(offsets)), self.after[partition])


def windows(
    chunks: Iterator[Chunk | None], start: Mapping[str, Left], options: StreamOptions
) -> Iterator[Window]:
    """Yield the windows of a source's chunks.

    Rows of ``start`` that are left of an unfinished window form the first window.
    """
    restored, held = _restored(chunks, start)
    if restored:
        yield _window(restored, options.group_by)
    following = chain(held, chunks)
    if options.group_by is None:
        yield from (_window([chunk], None) for chunk in following if chunk is not None)
        return
    waiting: list[Chunk] = []
    num_rows, opened = 0, 0.0
    for chunk in following:
        rest = chunk
        while rest is not None:
            opened = opened if waiting else time.monotonic()
            first, rest = _cut(rest, options.window_rows - num_rows)
            waiting.append(first)
            num_rows += len(first.offsets)
            if num_rows == options.window_rows:
                yield _window(waiting, options.group_by)
                waiting, num_rows = [], 0
        if waiting and time.monotonic() - opened >= options.window_seconds:
            yield _window(waiting, options.group_by)
            waiting, num_rows = [], 0
    if waiting:
        yield _window(waiting, options.group_by)


def _restored(
    chunks: Iterator[Chunk | None], start: Mapping[str, Left]
) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks of a partly trained window, and chunks after it that were read too."""
    stops = {name: left.window[-1][1] or 0 for name, left in start.items() if left.window}
    restored, held = list[Chunk](), list[Chunk]()
    for chunk in filter(None, chunks if stops else ()):
        name = chunk.partition
        if (stop := stops.get(name)) is None:
            held.append(chunk)
            continue
        if chunk.until >= stop:
            del stops[name]
        first, rest = _cut(chunk, int(np.searchsorted(chunk.offsets, stop)))
        restored.append(replace(first, after=start[name].after))
        if rest is not None:
            held.append(rest)
        if not stops:
            break
    return restored, held


def _cut(chunk: Chunk, num_rows: int) -> tuple[Chunk, Chunk | None]:
    """Return the first ``num_rows`` rows of a chunk, and the other rows."""
    if num_rows >= len(chunk.offsets):
        return chunk, None
    stop = int(chunk.offsets[num_rows])
    after = joined(((stop, chunk.until), *chunk.after))
    rows, offsets = chunk.rows[:num_rows], chunk.offsets[:num_rows]
    first = Chunk(chunk.partition, rows, offsets, stop, after)
    return first, replace(chunk, rows=chunk.rows[num_rows:], offsets=chunk.offsets[num_rows:])


def _window(chunks: Sequence[Chunk], group_by: str | None) -> Window:
    partitions = np.concatenate([np.full(len(each.offsets), each.partition) for each in chunks])
    offsets = np.concatenate([chunk.offsets for chunk in chunks])
    rows = pa.concat_batches([chunk.rows for chunk in chunks])
    order = np.lexsort((offsets, partitions))
    if group_by is not None and len(order):
        groups = rows.column(group_by).dictionary_encode().indices.to_numpy()[order]
        last = np.zeros(groups.max() + 1, np.int64)
        last[groups] = np.arange(len(groups))  # the last assignment of each group stays
        order = order[np.argsort(last[groups], kind="stable")]
    after = {chunk.partition: chunk.after for chunk in chunks}
    return Window(rows.take(pa.array(order)), partitions[order], offsets[order], after)

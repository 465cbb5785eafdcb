"""Ranges of rows that follow each other in the order of the output, each in memory or spilled."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.cluster.arena import Arena
from recd_plugin_recd.cluster.gather import Gather
from recd_plugin_recd.cluster.keys import Cut, Keys
from recd_plugin_recd.cluster.memory import BATCH_BYTES
from recd_plugins.api import DataError, SessionKeys


@dataclass
class Range:
    """The rows between two cuts, in the order of the input.

    Attributes:
        path: the spill file, Arrow's stream format; None for a range in memory.
        goes_on: it starts within the session with which the range before it ends.
    """

    path: Path | None
    goes_on: bool
    num_rows: int = 0
    num_bytes: int = 0
    batches: list[pa.RecordBatch] = field(default_factory=list)

    def read(self, whole: bool = False) -> Iterator[pa.RecordBatch]:
        """Its rows, of which one batch is in memory at a time, or the whole range.

        Raises:
            DataError: the spill file is damaged.
        """
        if self.path is None:
            yield from self.batches
            return
        try:
            if whole:
                yield from pa.ipc.open_stream(_mapped(self.path))
            else:
                # Read, not mapped: pages of a mapped file count as memory of this process.
                with pa.OSFile(str(self.path)) as file:
                    yield from pa.ipc.open_stream(file)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self.path}: a spill file cannot be read: {error}") from error

    def drop(self) -> None:
        """Free what it takes."""
        self.batches.clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def deal(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    keys: SessionKeys,
    cuts: list[Cut],
    *,
    paths: list[Path] | None = None,
    most: int | None = None,
    goes_on: bool = False,
) -> list[Range] | None:
    """Put each row into its range, of which there is one more than cuts.

    Args:
        paths: a spill file for each range; None keeps the rows in memory.
        most: give up when there are more bytes than this, and return None.
        goes_on: whether the first range does.

    Raises:
        DataError: the disk is full.
    """
    starts = [goes_on, *(cut.time is not None for cut in cuts)]
    ranges = [Range(paths[number] if paths else None, start) for number, start in enumerate(starts)]
    writers: list[Any] = []
    row = size = 0
    # Spilled rows are done with when they are written; others are kept where they are.
    arena = Arena() if paths else None
    try:
        with ExitStack() as stack:
            for path in paths or ():
                sink = stack.enter_context(pa.OSFile(str(path), "wb"))
                writers.append(stack.enter_context(pa.ipc.new_stream(sink, schema)))
            for batch in batches:
                parts = [batch] if not cuts else _split(batch, row, keys, cuts, arena or Arena())
                row += batch.num_rows
                size += batch.nbytes
                if most is not None and size > most:
                    return None
                for number, part in enumerate(parts):
                    if part.num_rows:
                        ranges[number].num_rows += part.num_rows
                        ranges[number].num_bytes += part.nbytes
                        if writers:
                            writers[number].write_batch(part)
                        else:
                            ranges[number].batches.append(part)
    except OSError as error:
        where = paths[0].parent if paths else "memory"
        raise DataError(f"{where}: rows cannot be spilled here ({error})") from error
    filled = [each for each in ranges if each.num_rows]
    if filled:
        # Cuts may lie before the first row.
        filled[0].goes_on = goes_on
    return ranges


def together(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of no less than ``BATCH_BYTES``, the last one smaller."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= BATCH_BYTES:
            yield pa.concat_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_batches(waiting)


def keys_of(batch: Any, keys: SessionKeys) -> Keys:
    """Sessions and times of a batch or table."""
    return Keys.of(batch.column(keys.session), batch.column(keys.timestamp))


def _mapped(path: Path) -> Any:
    """The bytes of a file where the system has them; a copy would need as much memory again."""
    with path.open("rb") as file:
        # Pages one by one cost more than all at once; only Linux offers that.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ))


def _split(
    batch: pa.RecordBatch, first_row: int, keys: SessionKeys, cuts: list[Cut], arena: Arena
) -> list[pa.RecordBatch]:
    """The rows of each range, in the order of the output."""
    own = keys_of(batch, keys)
    order = own.order()
    own = own.take(order)
    numbers: NDArray[np.int64] = order + first_row
    ends = [own.position(cut, numbers) for cut in cuts]
    ordered = Gather([batch], batch.schema, arena).take(order)
    bounds = [0, *ends, batch.num_rows]
    return [ordered.slice(start, end - start) for start, end in pairwise(bounds)]

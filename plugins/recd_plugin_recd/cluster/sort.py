"""Sorts a partition by session and time on disk, within a memory limit.

First, the session and time columns are read to find sort keys that divide the rows into ranges of
equal size. Then each row is written to a temporary file of its range. Finally, several ranges at a
time are loaded, sorted and written. A session larger than a range is divided by time, but its rows
are written to one file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recd_plugin_recd.sessions import (
    Nulls,
    ParquetSource,
    Partition,
    SessionTable,
    check_keys,
    plain_rows,
    plain_schema,
    plain_sessions,
    session_hashes,
    without_nulls,
)
from recd_plugins.api import DataError, SessionKeys, list_dict, parquet_writer, readers, text_utils

Layouts = dict[str, list_dict.Layout]
#: Called with the number of rows read and written since the last call.
Progress = Callable[[int, int], None]

#: Memory reserved for Python, Arrow, numba, allocators, and imports of a dataset plugin.
_LIBRARIES, _TORCH = 400_000_000, 200_000_000
#: Minimum bytes of a batch that is split among spill files, and of a range.
_BATCH_BYTES = 16 << 20
#: Maximum bytes of a range. Keeps 32-bit offsets of lists and strings from overflowing.
_LARGEST_RANGE = 1 << 30
#: Maximum number of spill files at once. Arrow needs a few kB per batch of each file.
_MOST_RANGES = 64
_SAMPLED_ROWS = 1 << 16
#: Memory to sort a range, as a multiple of its bytes, and row groups buffered by a writer.
_COPIES, _GROUPS = 2.2, 3
_MOST_WORKERS = 8
#: Sort order of rows. Ties keep the input order.
_ORDER = [(name, "ascending") for name in ("session", "time", "number")]


@dataclass(frozen=True)
class ClusterOptions:
    """Options of ``recd cluster``.

    Attributes:
        source, target: paths to read and write.
        session, timestamp: session and time columns; None means ``session_id`` and ``ts``, or
            the columns of the registry file.
        memory: maximum bytes of the process, including Python and libraries.
        layout: storage of id lists, ``list`` or ``list_dict``.
        nulls: whether a null list is an error or becomes an empty list.
        keep_share: fraction of sessions to keep, in (0, 1].
        seed: seed that selects the sessions to keep.
        row_group_rows: maximum rows of a row group in the output.
        engine: sort engine, ``embedded`` or ``spark``.
    """

    source: Path
    target: Path
    session: str | None = None
    timestamp: str | None = None
    memory: int = 2_000_000_000
    layout: list_dict.Layout = "list"
    row_group_rows: int = 8192
    nulls: Nulls = "error"
    keep_share: float = 1.0
    seed: int = 0
    engine: Literal["embedded", "spark"] = "embedded"


@dataclass
class Range:
    """A temporary file with the rows whose sort keys are between two limits, not yet sorted.

    Attributes:
        path: the Arrow IPC file.
        goes_on: whether the first rows belong to the last session of the previous range.
        rows, bytes: number of rows, and their size in memory.
    """

    path: Path
    goes_on: bool
    rows: int = 0
    bytes: int = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the temporary file."""
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream


def sort_partition(
    source: SessionTable,
    partition: Partition,
    options: ClusterOptions,
    scratch: Path,
    layouts: Layouts | None,
    progress: Progress,
) -> tuple[Path, Layouts | None]:
    """Sort a partition into files ``part-*.parquet`` in a folder in ``scratch``.

    ``layouts`` maps features to ``list`` or ``list_dict``; if None, the first rows decide.

    Returns:
        The folder, and the layouts of the features.
    """
    parts = scratch / "parts"
    parts.mkdir(parents=True)
    schema = plain_schema(source.schema)
    first = next(_plain_rows(source, partition, options, schema, lambda _: None), None)
    if first is None:
        return parts, layouts
    plan = _plan(options, first, isinstance(source, ParquetSource))
    sorter = _Sorter(schema, source.keys, scratch, plan)

    def keys() -> Iterator[pa.Table]:
        for rows in source.read(partition, [source.keys.session, source.keys.timestamp]):
            check_keys(rows, source.keys)
            yield keys_of(kept_rows(rows.data, source.keys, options), source.keys)

    def rows() -> Iterator[pa.RecordBatch]:
        plain = _plain_rows(source, partition, options, schema, lambda count: progress(count, 0))
        return _in_larger_batches(plain)

    row_bytes = first.nbytes / max(1, first.num_rows)
    with closing(readers.prefetch(rows, 2)) as batches:
        ranges = sorter.deal(keys(), batches, row_bytes, "range")
    files: list[list[Range]] = []
    for each in ranges:
        if each.goes_on and files:
            files[-1].append(each)
        else:
            files.append([each])

    def write(number: int, layouts: Layouts | None) -> Layouts:
        path = parts / part_name(number)
        with table_writer(path, schema, source.keys, options, layouts) as writer:
            for part in files[number]:
                for batch in sorter.sorted_rows(part, options.row_group_rows):
                    writer.write(batch)
                    progress(0, batch.num_rows)
                part.path.unlink()
        return writer.layouts

    numbers = iter(range(len(files)))
    if layouts is None and options.layout == "list_dict":
        layouts = next((write(number, None) for number in islice(numbers, 1)), None)
    with ThreadPoolExecutor(plan.workers, "recd-cluster") as pool:
        written = [pool.submit(write, number, layouts) for number in numbers]
        try:
            for one in written:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return parts, layouts


@dataclass(frozen=True)
class Plan:
    """Maximum bytes of a range of rows, and number of ranges that are sorted in parallel."""

    range_bytes: int
    workers: int


def _plan(options: ClusterOptions, rows: pa.RecordBatch, parquet: bool) -> Plan:
    """Choose how many ranges of rows to sort in parallel, and their size, within the memory limit.

    Raises DataError if the limit is too small to sort one range.
    """
    group = int(options.row_group_rows * rows.nbytes / max(1, rows.num_rows))
    base = _LIBRARIES + (0 if parquet else _TORCH)
    least = base + _GROUPS * group + int(_COPIES * max(group, _BATCH_BYTES))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = max(1, min(cores or 1, _MOST_WORKERS, (options.memory - base) // (least - base)))
    if options.memory < least:
        raise DataError(
            f"--memory {text_utils.bytes_text(options.memory)} is too small: sorting needs at "
            f"least {-(-least // 10**6)}MB with --row-group-rows {options.row_group_rows}. Raise "
            "--memory or lower --row-group-rows."
        )
    size = ((options.memory - base) // workers - _GROUPS * group) / _COPIES
    return Plan(min(int(size), _LARGEST_RANGE), workers)


class _Sorter:
    """Writes rows to one temporary file per range of sort keys, and sorts each file."""

    def __init__(self, schema: pa.Schema, keys: SessionKeys, scratch: Path, plan: Plan) -> None:
        self._schema, self._keys, self._scratch, self._plan = schema, keys, scratch, plan

    def deal(
        self,
        keys: Iterable[pa.Table],
        rows: Iterator[pa.RecordBatch],
        row_bytes: float,
        name: str,
        goes_on: bool = False,
    ) -> list[Range]:
        """Write ``rows`` with sort keys ``keys`` to files that can each be sorted in memory."""
        cuts = _cuts(keys, lambda count: 1 + int(1.25 * count * row_bytes / self._plan.range_bytes))
        starts = [goes_on, *(number >= 0 for number in cuts["number"].to_pylist())]
        ranges = [
            Range(self._scratch / f"{name}-{number:02d}.arrow", start)
            for number, start in enumerate(starts)
        ]
        self._spill(rows, cuts, ranges)
        for each in ranges:
            if not each.rows:
                each.path.unlink()
        ranges = [each for each in ranges if each.rows]
        if ranges:
            ranges[0].goes_on = goes_on
        return [part for each in ranges for part in self._fit(each)]

    def sorted_rows(self, part: Range, at_once: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range, sorted by session and time, in batches of ``at_once`` rows."""
        batch = pa.concat_batches(list(part.batches()))
        numbered = _numbered(keys_of(batch, self._keys), np.arange(batch.num_rows))
        order = pc.sort_indices(numbered, _ORDER)
        for start in range(0, batch.num_rows, at_once):
            yield batch.take(order.slice(start, at_once))

    def _spill(self, rows: Iterator[pa.RecordBatch], cuts: pa.Table, ranges: list[Range]) -> None:
        first = 0
        with ExitStack() as stack:
            writers = []
            for each in ranges:
                sink = stack.enter_context(pa.OSFile(str(each.path), "wb"))
                writers.append(stack.enter_context(pa.ipc.new_stream(sink, self._schema)))
            for batch in rows:
                count = batch.num_rows
                numbers = 2 * np.arange(first, first + count)
                keys = pa.concat_tables([_numbered(keys_of(batch, self._keys), numbers), cuts])
                order = pc.sort_indices(keys, _ORDER).to_numpy()
                is_cut = order >= count
                ends = np.flatnonzero(is_cut) - np.arange(len(cuts))
                ordered = batch.take(pa.array(order[~is_cut]))
                for number, (start, end) in enumerate(pairwise([0, *ends.tolist(), count])):
                    if start < end:
                        part = ordered.slice(start, end - start)
                        writers[number].write_batch(part)
                        ranges[number].rows += part.num_rows
                        ranges[number].bytes += part.nbytes
                first += count

    def _fit(self, whole: Range) -> list[Range]:
        if whole.bytes <= self._plan.range_bytes or whole.rows == 1:
            return [whole]
        keys = (keys_of(batch, self._keys) for batch in whole.batches())
        # At least three parts: the first cut may coincide with the start of the range.
        row_bytes = max(whole.bytes, 1.7 * self._plan.range_bytes) / whole.rows
        rows = _in_larger_batches(whole.batches())
        parts = self.deal(keys, rows, row_bytes, whole.path.stem, whole.goes_on)
        whole.path.unlink()
        return parts


def _cuts(keys: Iterable[pa.Table], num_ranges: Callable[[int], int]) -> pa.Table:
    """Return sort keys at which the rows are divided into ranges of similar size.

    The keys, with the columns ``session``, ``time`` and ``number``, come from an even sample of the
    rows. Row i has the number ``2 * i``. A key before a session has the number -1 and the smallest
    time. Inside a session larger than a range, the key before row i has the number ``2 * i - 1``.
    """
    count, step = 0, 1
    sample: list[pa.Table] = []
    for table in keys:
        numbers = np.arange(count, count + len(table))
        count += len(table)
        sample.append(_every(_numbered(table, numbers), step))
        while sum(map(len, sample)) > 2 * _SAMPLED_ROWS:
            step *= 2
            sample = [_every(pa.concat_tables(sample).combine_chunks(), step)]
    chosen = pa.concat_tables(sample).combine_chunks()
    chosen = chosen.take(pc.sort_indices(chosen, _ORDER))
    wanted = min(_MOST_RANGES, num_ranges(count))
    places = np.unique(np.arange(1, wanted) * len(chosen) // wanted)
    cuts = chosen.take(pa.array(places, pa.int64()))
    sessions = cuts["session"].to_pylist()
    same = np.array([one == two for one, two in pairwise([None, *sessions])], bool)
    times, numbers = cuts["time"].to_numpy(), cuts["number"].to_numpy()
    kind = times.dtype
    earliest = -np.inf if kind.kind == "f" else np.iinfo(kind).min
    times = np.where(same, times, earliest).astype(kind)
    numbers = np.where(same, 2 * numbers - 1, -1)
    return pa.table({"session": cuts["session"], "time": times, "number": numbers})


def _every(table: pa.Table, step: int) -> pa.Table:
    return table.filter(pa.array(table["number"].to_numpy() % step == 0))


def keys_of(batch: pa.RecordBatch, keys: SessionKeys) -> pa.Table:
    """Return a table of sort keys, with the columns ``session`` and ``time`` (a number)."""
    session, time = plain_sessions(batch.column(keys.session)), batch.column(keys.timestamp)
    if pa.types.is_timestamp(time.type):
        time = time.cast(pa.int64())
    return pa.table({"session": session, "time": time})


def _numbered(keys: pa.Table, numbers: np.ndarray) -> pa.Table:
    return keys.append_column("number", pa.array(numbers, pa.int64()))


def _in_larger_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(each.nbytes for each in waiting) >= _BATCH_BYTES:
            yield pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)


def _plain_rows(
    source: SessionTable,
    partition: Partition,
    options: ClusterOptions,
    schema: pa.Schema,
    read: Callable[[int], None],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the sessions to keep, with id lists as list<int64> without nulls."""
    for rows in source.read(partition):
        read(len(rows))
        plain = plain_rows(without_nulls(rows, source.features, options.nulls), schema)
        batch = kept_rows(plain, source.keys, options)
        if batch.num_rows:
            yield batch


def kept_rows(batch: pa.RecordBatch, keys: SessionKeys, options: ClusterOptions) -> pa.RecordBatch:
    """Return the rows of the sessions that ``keep_share`` and ``seed`` select (RecD, section 7)."""
    if options.keep_share >= 1:
        return batch
    hashes = session_hashes(batch.column(keys.session), options.seed)
    return batch.filter(pa.array(hashes >> np.uint64(11) < options.keep_share * 2.0**53))


def table_writer(
    path: Path,
    schema: pa.Schema,
    keys: SessionKeys,
    options: ClusterOptions,
    layouts: Layouts | None,
) -> parquet_writer.TableWriter:
    """Return a writer for the output file ``path``.

    ``layouts`` maps features to ``list`` or ``list_dict``; if None, the first rows decide.
    """
    return parquet_writer.TableWriter(
        path,
        schema,
        keys=keys,
        layout=layouts or options.layout,
        row_group_rows=options.row_group_rows,
        nulls=options.nulls,
    )


def part_name(number: int) -> str:
    """Return the file name ``part-NUMBER.parquet``."""
    return f"part-{number:05d}.parquet"

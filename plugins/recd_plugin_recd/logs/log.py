"""Logs of rows, sharded by session (RecD, section 4.1, O1).

A log is a folder with Parquet files, called segments, and the file ``log.json``, which lists the
segments. A row group of a segment is a block. Readers see only segments in ``log.json``, so the
rows of a ``flush`` become visible atomically.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recd_plugin_recd.sessions import plain_sessions, session_shards
from recd_plugins.api import DataError, file_utils, folders

#: File that lists the segments of a log.
INDEX = "log.json"
#: Footer key with the range of log records in a file, as JSON.
PROVENANCE = b"recd.log"
_MOST_BATCHES = 512


class ParquetFile:
    """Writes a Parquet file with zstd compression and page checksums.

    Use it as a context manager, and call ``close`` at the end of the context. Otherwise the file is
    discarded. ``path`` may be changed within the same folder before ``close``.

    Args:
        path: file to write.
        schema: columns of the rows.
        block_size: size of a row group, in bytes of rows in memory.
        level: zstd compression level.
        sort: column by which the rows of a row group are sorted; None keeps the input order.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        block_size: int = 64 << 20,
        level: int = 3,
        sort: str | None = None,
    ) -> None:
        self.path = path
        self.num_rows = 0
        self._block_size, self._sort = block_size, sort
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self._scratch = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        # A dictionary makes lists of ids larger because zstd finds the repeats itself.
        self._writer = pq.ParquetWriter(
            self._scratch,
            schema,
            compression="zstd",
            compression_level=level,
            use_dictionary=False,
            write_page_checksum=True,
        )

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer.is_open:
            self._writer.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows. A row group is written to disk when it is full."""
        self._waiting.append(rows)
        self._bytes += rows.nbytes
        self.num_rows += rows.num_rows
        while self._bytes >= self._block_size:
            table = pa.Table.from_batches(self._waiting)
            count = max(1, table.num_rows * self._block_size // self._bytes)
            self._write_block(table.slice(0, count))
            self._waiting = table.slice(count).to_batches()
            self._bytes = sum(each.nbytes for each in self._waiting)
        if len(self._waiting) > _MOST_BATCHES:
            self._waiting = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()

    def close(self, provenance: dict[str, Any]) -> None:
        """Write the file to ``path`` atomically. Its metadata contains ``provenance`` as JSON."""
        if self._waiting:
            self._write_block(pa.Table.from_batches(self._waiting))
        self._writer.add_key_value_metadata({PROVENANCE: json.dumps(provenance).encode()})
        self._writer.close()
        _fsync(self._scratch)
        os.replace(self._scratch, self.path)
        _fsync(self.path.parent)

    def _write_block(self, block: pa.Table) -> None:
        if self._sort is not None:
            block = block.take(pc.sort_indices(plain_sessions(block[self._sort])))  # stable
        self._writer.write_table(block, row_group_size=block.num_rows)


def provenance(path: Path) -> dict[str, Any] | None:
    """Return the ``provenance`` in the metadata of a Parquet file. None if it has none."""
    try:
        file_utils.check_regular(path)
        metadata = pq.read_metadata(path).metadata or {}
        found = file_utils.parse_json(metadata.get(PROVENANCE, b"null"))
    except (ValueError, OSError):  # Arrow raises ValueError for damaged files.
        return None
    return found if isinstance(found, dict) else None


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class LogSettings:
    """Settings of a log: sharding and block size.

    Attributes:
        session: column of the session id, integers or strings.
        num_shards: number of shards. Each shard buffers one block in memory.
        block_size: size of a block, in bytes of rows in memory.
        sort: whether rows of a session become adjacent within a block.
    """

    session: str = "session_id"
    num_shards: int = 16
    block_size: int = 4 << 20
    sort: bool = True


@dataclass(frozen=True)
class Damage:
    """A damaged block or file of a log, whose rows cannot be read.

    Attributes:
        segment: path of the file.
        block: number of the block, or None if the whole file cannot be read.
        cause: reason, as text.
        rows_lost: number of rows that cannot be read.
    """

    segment: Path
    block: int | None
    cause: str
    rows_lost: int

    def __str__(self) -> str:
        what = "the file" if self.block is None else f"block {self.block}"
        return f"{self.segment}: {what} {self.cause}, so {self.rows_lost} rows are lost."


Report = Callable[[Damage], None]


@dataclass(frozen=True)
class Segment:
    """A Parquet file of a log, with rows of one shard.

    Attributes:
        name: file name.
        shard: number of the shard.
        rows, blocks: number of rows and of blocks (row groups).
        bytes, raw_bytes: size of the file, and size of its rows before compression.
        footer: CRC-32 of the Parquet footer.
    """

    name: str
    shard: int
    rows: int
    blocks: int
    bytes: int
    raw_bytes: int
    footer: int


@dataclass(frozen=True)
class LogIndex:
    """Content of ``log.json``, which lists the Parquet files (segments) of a log.

    Attributes:
        id: random identifier of the log.
        session: column of the session id.
        num_shards: number of shards.
        flushes: number of flushes so far.
        segments: all segments, oldest first.
    """

    id: str
    session: str
    num_shards: int
    flushes: int = 0
    segments: tuple[Segment, ...] = ()


def read_index(folder: Path) -> LogIndex:
    """Read ``log.json`` of the log in ``folder``.

    Raises DataError if the file is missing or damaged.
    """
    found = file_utils.read_note(folder / INDEX)
    if found is None:
        raise DataError(
            f"{folder} is not a log, because {INDEX} is missing or damaged. Use a folder that "
            "recd logs write has created."
        )
    segments = tuple(Segment(**each) for each in found.pop("segments"))
    return LogIndex(**found, segments=segments)


class LogWriter:
    """Writes rows to a new log, or appends rows to an existing log.

    As a context manager it calls ``flush`` at the end, except after an error. ``flush`` syncs the
    rows to disk and makes them visible to readers. Only one process can write to a log at a time.

    Args:
        folder: folder of the log.
        schema: columns of the rows.
        settings: sharding and block size. An existing log must have the same sharding.

    Raises:
        DataError: the folder has a log with another sharding or other columns.
        RecdError: another process writes to the log.

    Attributes:
        raw_bytes, stored_bytes: bytes of flushed rows before and after compression.
    """

    def __init__(self, folder: Path, schema: pa.Schema, settings: LogSettings) -> None:
        plain_sessions(pa.array([], schema.field(settings.session).type))
        self._folder, self._settings = folder, settings
        self._schema = schema.remove_metadata()
        self._files: dict[int, ParquetFile] = {}
        self.raw_bytes = self.stored_bytes = 0
        with ExitStack() as opened:
            opened.enter_context(folders.locked_folder(folder))
            self._index = self._begin()
            for left in folder.glob(".shard-*.partial"):  # left by a killed writer
                left.unlink()
            self._opened = opened.pop_all()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._opened:
            if kind is None:
                self.flush()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. Full blocks are written to disk, but become visible only with ``flush``."""
        settings = self._settings
        batch = batch.replace_schema_metadata(None)
        shards = session_shards(batch.column(settings.session), settings.num_shards)
        order = np.argsort(shards, kind="stable")
        starts = np.searchsorted(shards[order], np.arange(settings.num_shards + 1))
        for shard in np.unique(shards).tolist():
            rows = order[starts[shard] : starts[shard + 1]]
            self._file(shard).write(batch.take(pa.array(rows)))

    def flush(self) -> None:
        """Write all buffered rows to disk, and make them visible to readers."""
        segments = []
        for shard, file in sorted(self._files.items()):
            file.close({"log": self._index.id})
            segments.append(_segment(file.path, shard))
        self._files.clear()
        self.raw_bytes += sum(each.raw_bytes for each in segments)
        self.stored_bytes += sum(each.bytes for each in segments)
        self._index = replace(
            self._index,
            flushes=self._index.flushes + 1,
            segments=(*self._index.segments, *segments),
        )
        file_utils.write_note(self._folder / INDEX, asdict(self._index))
        _fsync(self._folder / INDEX)
        _fsync(self._folder)

    def _begin(self) -> LogIndex:
        settings = self._settings
        if not (self._folder / INDEX).exists():
            return LogIndex(secrets.token_hex(8), settings.session, settings.num_shards)
        index = read_index(self._folder)
        flags = {"num_shards": "--shards", "session": "--session"}
        for name in flags:
            asked, there = getattr(settings, name), getattr(index, name)
            if asked != there:
                raise DataError(
                    f"{self._folder}: the log has {name} {there}, but {asked} was requested. Set "
                    f"{flags[name]} to {there}, or write a new log."
                )
        if index.segments and not Consumer(self._folder, None, print).schema().equals(self._schema):
            raise DataError(
                f"{self._folder}: the new rows have other columns than the log, or other types. "
                "Append rows with the same columns and types, or write a new log."
            )
        return index

    def _file(self, shard: int) -> ParquetFile:
        if shard not in self._files:
            settings = self._settings
            file = ParquetFile(
                self._folder / f"shard-{shard:05d}-{self._index.flushes:06d}.parquet",
                self._schema,
                block_size=settings.block_size,
                level=1,
                sort=settings.session if settings.sort else None,
            )
            self._files[shard] = self._opened.enter_context(file)
        return self._files[shard]


def _segment(path: Path, shard: int) -> Segment:
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    raw_bytes = sum(group.total_byte_size for group in groups)
    size, footer = path.stat().st_size, _footer_checksum(path)
    return Segment(path.name, shard, metadata.num_rows, len(groups), size, raw_bytes, footer)


class Consumer:
    """Iterates over the rows of a log, shard by shard and block by block. Skips damaged blocks.

    ``commit`` stores the read position in a JSON file, from where the next consumer continues.

    Args:
        folder: folder of the log.
        offsets: the JSON file. If it is None or missing, reading starts at the first row.
        report: called with a Damage for each damaged block or file.

    Raises:
        DataError: there is no log, or the JSON file is damaged or belongs to another log.
    """

    def __init__(self, folder: Path, offsets: Path | None, report: Report) -> None:
        self._folder, self._offsets, self._report = folder, offsets, report
        self.index = read_index(folder)
        self._blocks = [0] * self.index.num_shards  # number of records read per shard
        if offsets is not None and os.path.lexists(offsets):
            self.load(file_utils.read_note(offsets))

    def schema(self) -> pa.Schema:
        """Return the columns of the log, as a pyarrow schema."""
        for segment in self.index.segments:
            opened = _open(self._folder, segment)
            if isinstance(opened, pq.ParquetFile):
                with opened:
                    return opened.schema_arrow.remove_metadata()
        raise DataError(
            f"{self._folder}: no segment of the log can be read. Restore the log from a backup."
        )

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for shard in range(self.index.num_shards):
            start = 0
            for segment in self.index.segments:
                if segment.shard == shard:
                    skip = max(0, self._blocks[shard] - start)
                    for block, rows in _read_blocks(self._folder, segment, skip, self._report):
                        self._blocks[shard] = start + block + 1
                        yield rows
                    start += segment.blocks
                    self._blocks[shard] = max(start, self._blocks[shard])

    def state(self) -> dict[str, Any]:
        """Return the read position as JSON values."""
        return {"log": self.index.id, "blocks": list(self._blocks)}

    def load(self, state: Any) -> None:
        """Set the read position returned by ``state()``. Raises DataError for another log."""
        if not isinstance(state, dict) or state.get("log") != self.index.id:
            raise DataError(
                f"{self._offsets}: the file has no valid offsets for the log {self._folder}. Use "
                "another file for --offsets, or remove the file to start at the first row."
            )
        self._blocks = list(state["blocks"])

    def commit(self) -> None:
        """Write the read position to the JSON file. Replaces the file atomically."""
        assert self._offsets is not None, "a consumer without an offsets file commits nothing"
        file_utils.write_note(self._offsets, self.state())


def _read_blocks(
    folder: Path, segment: Segment, first: int, report: Report
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (block number, rows) of a segment, from block ``first`` on. Reports damaged blocks."""
    if first >= segment.blocks:
        return
    opened = _open(folder, segment)
    if isinstance(opened, Damage):
        report(opened)
        return
    with opened:
        schema = opened.schema_arrow.remove_metadata()
        for block in range(first, segment.blocks):
            try:
                table = opened.read_row_group(block).combine_chunks().cast(schema)
            except (pa.ArrowException, OSError) as error:
                lost = opened.metadata.row_group(block).num_rows
                report(Damage(folder / segment.name, block, f"cannot be read ({error})", lost))
                continue
            (rows,) = table.to_batches()
            yield block, rows


def _open(folder: Path, segment: Segment) -> pq.ParquetFile | Damage:
    """Open a segment. Returns a Damage if the file is not the file listed in ``log.json``."""
    path = folder / segment.name
    try:
        file_utils.check_regular(path)
        if path.stat().st_size == segment.bytes and _footer_checksum(path) == segment.footer:
            return pq.ParquetFile(path, page_checksum_verification=True)
        cause = f"differs from the file that is listed in {INDEX}"
    except FileNotFoundError:
        cause = "is missing"
    except (pa.ArrowException, OSError) as error:
        cause = f"cannot be read ({error})"
    return Damage(path, None, cause, segment.rows)


def _footer_checksum(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(max(0, end - size))
        return zlib.crc32(file.read())

"""Writing rows to the shards of a log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_recd.logs.blocks import block_codec
from recd_plugin_recd.logs.compression import Compression
from recd_plugin_recd.logs.damage import Report
from recd_plugin_recd.logs.data_errors import ColumnError
from recd_plugin_recd.logs.manifest import MANIFEST, read_manifest, write_manifest
from recd_plugin_recd.logs.shard_files import shard_name
from recd_plugin_recd.logs.shard_format import Key, Record, ShardHeader, read_header
from recd_plugin_recd.logs.shard_key import session_shards
from recd_plugin_recd.logs.shard_writer import ShardWriter
from recd_plugins.api import DataError

BLOCK_SIZE = 4 << 20


@dataclass(frozen=True)
class LogSettings:
    """How a log is sharded and stored.

    Attributes:
        key: ``session``: all rows of a session go to one shard; ``message``: each row goes to a
            random one, the baseline.
        session: the column of the session, whole numbers or strings.
        record: ``sample``: rows one after the other; ``batch``: a record batch a block.
        block_size: bytes before compression from which a block is written. Each shard gathers
            that much in memory.
        sort: bring the rows of a session together inside a block, in the order they came.
    """

    session: str = "session_id"
    num_shards: int = 16
    key: Key = "session"
    record: Record = "sample"
    block_size: int = BLOCK_SIZE
    sort: bool = True
    compression: Compression = field(default_factory=Compression)


class LogWriter:
    """Writes rows of ``schema`` to the log in ``folder``, new or there already.

    Rows are safe from the end of this process once ``flush`` or ``close`` has returned, and from
    the end of the machine too (fsync). Before that a killed process loses what has not filled a
    block.

    Raises:
        DataError: the folder has another log, another writer, lacks a shard, or cannot be written;
            a column cannot be stored.
    """

    def __init__(
        self, folder: Path, schema: pa.Schema, settings: LogSettings, report: Report
    ) -> None:
        if settings.session not in schema.names:
            raise DataError(
                f"no column {settings.session!r} for the session; the columns are "
                f"{', '.join(schema.names)}"
            )
        self._settings = settings
        self._schema = schema.remove_metadata()
        self._codec = block_codec(settings.record, self._schema)
        self._random = np.random.default_rng(0)
        kind = schema.field(settings.session).type
        try:
            session_shards(pa.array([], kind), settings.num_shards)
        except ColumnError as error:
            raise ColumnError(f"column {settings.session!r}: {error}") from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot be written ({error.strerror})") from error
        other = [
            path for path in folder.glob("shard-*.recdlog") if path not in _paths(folder, settings)
        ]
        if other:
            there = other[0].stem.rpartition("-of-")[2].lstrip("0")
            raise DataError(f"{folder}: the log has {there} shards, not {settings.num_shards}")
        found = read_manifest(folder)
        if found is None:
            _refuse_missing(folder, settings)
        promises = found or {}
        names = {path.name for path in _paths(folder, settings)}
        if unknown := sorted(promises.keys() - names):
            raise DataError(
                f"{folder / MANIFEST}: the log has {unknown[0]}, which is none of "
                f"{settings.num_shards} shards"
            )
        self._folder = folder
        with ExitStack() as opened:
            self._shards = []
            for number, path in enumerate(_paths(folder, settings)):
                header = self._header(number)
                writer = ShardWriter(
                    path, header, settings.compression, report, promises.get(path.name)
                )
                opened.callback(writer.close)
                self._shards.append(_Buffer(writer, settings))
            for shard in self._shards:  # blocks of a killed writer may not be on the disk yet
                shard.writer.sync()
            self._promise()
            self._opened = opened.pop_all()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error the rows in memory are not written: nobody was told that they are.
        if kind is None:
            self.close()
        else:
            self._opened.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; every shard that has a block's bytes writes a block.

        Raises:
            DataError: other columns than the log's, a null session, a value that cannot be
                stored, or a full disk.
        """
        batch = batch.replace_schema_metadata(None)
        if not batch.schema.equals(self._schema):
            raise DataError("the rows have other columns than the log")
        shards = self._assign(batch)
        sizes = self._codec.row_sizes(batch)
        order = np.argsort(shards, kind="stable")
        starts = np.searchsorted(shards[order], np.arange(self._settings.num_shards + 1))
        for shard in np.unique(shards):
            rows = order[starts[shard] : starts[shard + 1]]
            self._shards[shard].add(batch.take(pa.array(rows)), sizes[rows])

    @property
    def raw_bytes(self) -> int:
        """Bytes of the blocks written so far, before compression."""
        return sum(shard.writer.raw_bytes for shard in self._shards)

    @property
    def stored_bytes(self) -> int:
        """Bytes of these blocks in the shards, without headers."""
        return sum(shard.writer.stored_bytes for shard in self._shards)

    def flush(self) -> None:
        """Write the rows in memory, as smaller blocks, and wait for the disk."""
        for shard in self._shards:
            shard.flush()
            shard.writer.sync()
        self._promise()

    def close(self) -> None:
        """``flush``, and leave the shards to other writers."""
        with self._opened:
            self.flush()

    def _promise(self) -> None:
        """Say what is there from now on, as the shards are on the disk."""
        write_manifest(
            self._folder, {shard.writer.path.name: shard.writer.promise for shard in self._shards}
        )

    def _header(self, shard: int) -> ShardHeader:
        settings = self._settings
        return ShardHeader(
            settings.record,
            shard,
            settings.num_shards,
            settings.key,
            settings.session,
            os.urandom(16),
            self._schema,
        )

    def _assign(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        settings = self._settings
        if settings.key == "message":
            return self._random.integers(0, settings.num_shards, batch.num_rows)
        return session_shards(batch.column(settings.session), settings.num_shards)


class _Buffer:
    """The rows of one shard that wait for their block."""

    def __init__(self, writer: ShardWriter, settings: LogSettings) -> None:
        self.writer = writer
        self._settings = settings
        self._batches: list[pa.RecordBatch] = []
        self._size = 0

    def add(self, rows: pa.RecordBatch, sizes: NDArray[np.int64]) -> None:
        for start, end, size in self._cut(sizes):
            self._batches.append(rows.slice(start, end - start))
            self._size += size
            if self._size >= self._settings.block_size:
                self.flush()

    def flush(self) -> None:
        if not self._batches:
            return
        rows = pa.Table.from_batches(self._batches).combine_chunks()
        if self._settings.sort:
            sessions = rows[self._settings.session]
            if pa.types.is_dictionary(sessions.type):
                sessions = sessions.cast(sessions.type.value_type)  # Arrow cannot sort it
            # The sort is stable: a session's rows stay in the order in which they came.
            rows = rows.take(pc.sort_indices(sessions))
        (batch,) = rows.combine_chunks().to_batches()
        self.writer.append(batch)
        self._batches.clear()
        self._size = 0

    def _cut(self, sizes: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Where to cut rows so that each block ends with the row that fills it."""
        ends = np.cumsum(sizes)
        start = 0
        while start < len(sizes):
            before = int(ends[start - 1]) if start else 0
            room = self._settings.block_size - self._size
            end = min(len(sizes), int(np.searchsorted(ends, before + room)) + 1)
            yield start, end, int(ends[end - 1]) - before
            start = end


def _paths(folder: Path, settings: LogSettings) -> list[Path]:
    count = settings.num_shards
    return [folder / shard_name(number, count) for number in range(count)]


def _refuse_missing(folder: Path, settings: LogSettings) -> None:
    """Refuse to begin a shard anew where the others have rows, and no manifest knows of it."""
    there = [path for path in _paths(folder, settings) if path.exists()]
    missing = [path for path in _paths(folder, settings) if not path.exists()]
    if missing and any(map(_has_blocks, there)):
        raise DataError(
            f"{missing[0]}: the shard is missing, and so is {MANIFEST}; put the shard back, or "
            "bring what is left to a new log by recd logs read --skip-damaged"
        )


def _has_blocks(path: Path) -> bool:
    with path.open("rb") as file:
        header = read_header(file)
    return header is None or path.stat().st_size > header.end

"""Appending blocks to a shard file."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from pathlib import Path

import pyarrow as pa

from recd_plugin_recd.logs.blocks import block_codec
from recd_plugin_recd.logs.compression import Compression
from recd_plugin_recd.logs.damage import Damage, Report
from recd_plugin_recd.logs.manifest import MANIFEST, Promise, first_digest, next_digest
from recd_plugin_recd.logs.shard_files import check_place
from recd_plugin_recd.logs.shard_format import LARGEST_BLOCK, BlockHeader, ShardHeader, read_header
from recd_plugin_recd.logs.shard_reader import Position, ShardReader
from recd_plugins.api import DataError


class ShardWriter:
    """The one writer of a shard file, made if it is missing.

    What a killed writer left behind its last whole block is cut off and reported. A block is
    handed to the system as it is written: it outlives the process, and after ``sync`` the machine.

    Args:
        promise: what the log's manifest says of the shard; None where it is new.

    Raises:
        DataError: another writer has the shard, it is no shard, it has less than was promised, or
            it was begun with other settings or columns.

    Attributes:
        raw_bytes, stored_bytes: bytes of the blocks of this writer before compression and after.
    """

    def __init__(
        self,
        path: Path,
        header: ShardHeader,
        compression: Compression,
        report: Report,
        promise: Promise | None = None,
    ) -> None:
        self.path = path
        self._promise = promise
        self._codec = block_codec(header.record, header.schema)
        self._zstd = compression.compressor()
        self._end = self._next_record = 0
        self._digest = ""
        self.raw_bytes = self.stored_bytes = 0
        if promise is not None and not path.exists():
            raise self._broken("is missing")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritten(path, error) from error
        try:
            self._lock()
            self._sync_bytes = self._begin(header, report)
        except OSError as error:
            os.close(self._file)
            raise _unwritten(path, error) from error
        except BaseException:
            os.close(self._file)
            raise

    def append(self, rows: pa.RecordBatch) -> None:
        """Write one block of these rows, at least one.

        Raises:
            DataError: the block cannot be written; the shard is as before.
        """
        data = self._codec.encode(rows)
        if len(data) > LARGEST_BLOCK:
            raise DataError(
                f"{self.path}: a block of {len(data)} bytes; {LARGEST_BLOCK} are the most"
            )
        stored = self._zstd.compress(data)
        header = BlockHeader(
            self._next_record, rows.num_rows, len(data), len(stored), zlib.crc32(stored)
        )
        self._write(header.to_bytes(self._sync_bytes) + stored)
        self._next_record = header.end_record
        self._digest = next_digest(self._digest, header, self._sync_bytes)
        self.raw_bytes += len(data)
        self.stored_bytes += len(stored)

    def sync(self) -> None:
        """Return when all blocks are on the disk (fsync)."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _unwritten(self.path, error) from error

    @property
    def promise(self) -> Promise:
        """What is there; after ``sync``, for the manifest."""
        return Promise(self._sync_bytes.hex(), self._end, self._next_record, self._digest)

    def close(self) -> None:
        """Give the shard free for another writer."""
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.path}: another writer is appending to this shard; a shard has one writer"
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot be locked ({error.strerror})") from error

    def _begin(self, header: ShardHeader, report: Report) -> bytes:
        """Read or write the header, and stand after the last whole block."""
        size = os.fstat(self._file).st_size
        if self._promise is not None and size < self._promise.bytes:
            raise self._broken(f"was cut to {size} bytes")
        new = header.to_bytes()
        with self.path.open("rb") as file:
            found = read_header(file)
        if found is None and size >= len(new):
            raise DataError(f"{self.path}: no header of a log shard that is whole")
        if found is None or (found.damaged_at is not None and size < len(new)):
            if size:
                cause = "the header is cut off; it is written anew"
                report(Damage(self.path, 0, cause, 0, None))
            self._write(new)
            self._sync_folder()
            self._digest = first_digest(header.sync)
            return header.sync
        _check_same(self.path, header, found.header)
        with ShardReader(self.path, report) as reader:
            end, self._digest = reader.end()
            self._check_promise(reader, end)
        if end.offset < size:
            cause = f"{size - end.offset} bytes that are no whole block were cut off"
            report(Damage(self.path, end.offset, cause, None, None))
            os.ftruncate(self._file, end.offset)
        self._end, self._next_record = end.offset, end.record
        return found.header.sync

    def _check_promise(self, reader: ShardReader, end: Position) -> None:
        """Refuse to add to a shard that is not what the manifest says: it would be forgotten."""
        if self._promise is None:
            return
        if self._promise.log != reader.header.sync.hex():
            raise self._broken("is another log's")
        if end.offset < self._promise.bytes:
            raise self._broken("is damaged at its end")
        if reader.digest(self._promise.bytes) not in (None, self._promise.digest):
            raise self._broken("has other blocks than were written")

    def _broken(self, what: str) -> DataError:
        assert self._promise is not None, "the caller looked"
        return DataError(
            f"{self.path}: the shard {what}, and {MANIFEST} promises {self._promise.records} "
            f"records in {self._promise.bytes} bytes; put the shard back, or bring what is left "
            "to a new log by recd logs read --skip-damaged"
        )

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                done = len(data) - len(view)
                view = view[os.pwrite(self._file, view, self._end + done) :]
        except OSError as error:
            # A full disk: nothing of the block stays.
            os.ftruncate(self._file, self._end)
            raise _unwritten(self.path, error) from error
        self._end += len(data)

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _unwritten(path: Path, error: OSError) -> DataError:
    advice = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "; each shard is an open file: take fewer shards, or raise the limit, `ulimit -n`"
    return DataError(f"{path}: cannot be written ({error.strerror}){advice}")


def _check_same(path: Path, new: ShardHeader, old: ShardHeader) -> None:
    check_place(path, old)
    for name in ("num_shards", "shard", "key", "session", "record"):
        asked, there = getattr(new, name), getattr(old, name)
        if asked != there:
            raise DataError(f"{path}: the log was begun with {name} {there}, not {asked}")
    if not new.schema.equals(old.schema, check_metadata=True):
        differ = [
            name
            for name in dict.fromkeys([*old.schema.names, *new.schema.names])
            if name not in old.schema.names
            or name not in new.schema.names
            or not old.schema.field(name).equals(new.schema.field(name), check_metadata=True)
        ]
        which = f"they differ in {', '.join(differ)}" if differ else "their order differs"
        raise DataError(f"{path}: the log has other columns: {which}")

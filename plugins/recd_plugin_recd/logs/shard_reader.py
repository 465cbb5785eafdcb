"""Reading a shard: what is whole comes out, what is damaged is reported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_recd.logs.blocks import block_codec
from recd_plugin_recd.logs.compression import decompressed, wrong_frame
from recd_plugin_recd.logs.damage import Damage, Report
from recd_plugin_recd.logs.manifest import first_digest, next_digest
from recd_plugin_recd.logs.shard_files import check_place
from recd_plugin_recd.logs.shard_format import (
    BLOCK_HEADER_SIZE,
    SYNC_SIZE,
    BlockHeader,
    FoundHeader,
    read_header,
)
from recd_plugins.api import DataError

_SCAN_BYTES = 1 << 20


@dataclass(frozen=True)
class Position:
    """Where to go on in a shard: the byte of a block and the number of the next record.

    The record may be inside of the block, or in a later one.
    """

    offset: int
    record: int


@dataclass(frozen=True)
class RecordBlock:
    """Records of a shard that came from one block.

    Attributes:
        first_record: number of the first of ``rows`` in the shard.
        header: of the whole block; ``rows`` may start inside of it.
        end: the position after it.
    """

    first_record: int
    header: BlockHeader
    rows: pa.RecordBatch
    end: Position


class ShardReader:
    """Reads one shard file, which may be growing.

    Raises:
        DataError: the file cannot be opened, has no header that is whole, or is another shard than
            its name says.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self._report = report
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        found = read_header(self._file)
        if found is None:
            self._file.close()
            raise DataError(f"{path}: no header of a log shard that is whole")
        self._found: FoundHeader = found
        self.header = found.header
        try:
            check_place(path, self.header)
            self._codec = block_codec(self.header.record, self.header.schema)
        except DataError:
            self._file.close()
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def start(self) -> Position:
        """The first record."""
        return Position(self._found.end, 0)

    def blocks(self, start: Position | None = None) -> Iterator[RecordBlock]:
        """Records from ``start`` to the end of the file as it is now.

        A block whose checksum is wrong is reported and left out; so is what is no block. Reading
        goes on at the next whole block header.

        Raises:
            DataError: a block whose checksum is right is not what the header of the shard says.
        """
        for position, header, payload in self.payloads(start):
            rows = self._decode(position.offset, header, payload)
            skip = max(0, position.record - header.first_record)
            end = Position(position.offset + BLOCK_HEADER_SIZE + header.size, header.end_record)
            yield RecordBlock(header.first_record + skip, header, rows.slice(skip), end)

    def payloads(
        self, start: Position | None = None
    ) -> Iterator[tuple[Position, BlockHeader, bytes]]:
        """Compressed blocks, checked but not decompressed, each where it starts."""
        start = start or self.start
        offset, record = start.offset, start.record
        size = os.fstat(self._file.fileno()).st_size
        if self._found.damaged_at is not None and offset == self._found.end:
            following = self._scan(offset, size)
            cause = "a copy of the header is damaged"
            lost = max(0, following[1].first_record - record) if following else None
            resumes_at = following[0] if following else None
            self._report(Damage(self.path, self._found.damaged_at, cause, lost, resumes_at))
            if following is None:
                return
            offset, record = following[0], record + (lost or 0)
        while offset < size:
            header = self._header_at(offset)
            if header is not None and header.end_record <= record:
                offset += BLOCK_HEADER_SIZE + header.size
                continue
            payload = self._payload(offset, header)
            if header is None or payload is None:
                following = self._scan(offset + 1, size)
                self._report_damage(offset, size, record, header, following)
                if following is None:
                    return
                offset = following[0]
                record = max(record, following[1].first_record)
                continue
            if header.first_record > record:
                cause = "the block before this one is missing"
                lost = header.first_record - record
                self._report(Damage(self.path, offset, cause, lost, offset))
            start_of_block, offset = offset, offset + BLOCK_HEADER_SIZE + header.size
            if (wrong := wrong_frame(payload, header.raw_size)) is not None:
                lost = header.end_record - max(record, header.first_record)
                self._report(Damage(self.path, start_of_block, wrong, lost, offset))
            else:
                yield Position(start_of_block, record), header, payload
            record = header.end_record

    def digest(self, end: int) -> str | None:
        """The digest of the blocks up to byte ``end``; None where one's header is damaged."""
        digest, offset = first_digest(self.header.sync), self.start.offset
        while offset < end:
            header = self._header_at(offset)
            if header is None:
                return None
            digest = next_digest(digest, header, self.header.sync)
            offset += BLOCK_HEADER_SIZE + header.size
        return digest

    def end(self) -> tuple[Position, str]:
        """The end of the last block of which all bytes are there, damaged or not.

        Returns:
            Where that is, and the digest of the blocks up to there whose headers are whole.
        """
        position, digest = self.start, first_digest(self.header.sync)
        size = os.fstat(self._file.fileno()).st_size
        while position.offset < size:
            header = self._header_at(position.offset)
            following = (position.offset, header) if header else None
            if header is None or position.offset + BLOCK_HEADER_SIZE + header.size > size:
                following = self._scan(position.offset + 1, size)
            if following is None:
                break
            offset, header = following
            after = offset + BLOCK_HEADER_SIZE + header.size
            if after > size:
                break
            position = Position(after, max(position.record, header.end_record))
            digest = next_digest(digest, header, self.header.sync)
        return position, digest

    def _read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def _header_at(self, offset: int) -> BlockHeader | None:
        return BlockHeader.parse(self._read(offset, BLOCK_HEADER_SIZE), self.header.sync)

    def _payload(self, offset: int, header: BlockHeader | None) -> bytes | None:
        """The block's compressed bytes if they are all there and right."""
        if header is None:
            return None
        payload = self._read(offset + BLOCK_HEADER_SIZE, header.size)
        return payload if header.is_of(payload) else None

    def _scan(self, start: int, size: int) -> tuple[int, BlockHeader] | None:
        """The next whole block header from byte ``start`` on."""
        while start + BLOCK_HEADER_SIZE <= size:
            data = self._read(start, _SCAN_BYTES)
            at = data.find(self.header.sync)
            if at < 0:
                start += max(1, len(data) - SYNC_SIZE + 1)
                continue
            header = self._header_at(start + at)
            if header is not None:
                return start + at, header
            start += at + 1
        return None

    def _report_damage(
        self,
        offset: int,
        size: int,
        record: int,
        header: BlockHeader | None,
        following: tuple[int, BlockHeader] | None,
    ) -> None:
        left = size - offset
        if header is not None:
            torn = BLOCK_HEADER_SIZE + header.size > left
            cause = "the block is cut off" if torn else "the block's checksum is wrong"
        else:
            cause = (
                f"{left} bytes that are no whole block"
                if following is None
                else "no block header that is whole"
            )
        if following is not None:
            lost: int | None = max(0, following[1].first_record - record)
        else:
            lost = header.end_record - record if header else None
        resumes_at = following[0] if following else None
        self._report(Damage(self.path, offset, cause, lost, resumes_at))

    def _decode(self, offset: int, header: BlockHeader, payload: bytes) -> Any:
        try:
            return self._codec.decode(decompressed(payload, header.raw_size), header.num_records)
        except DataError as error:
            raise DataError(
                f"{self.path}: byte {offset}: the block was written wrongly: {error}"
            ) from error

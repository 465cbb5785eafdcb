"""The bytes of a shard file: its header, which stands twice, and the headers of its blocks.

docs/commands/logs.md describes the format byte by byte.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO, Literal, get_args

import pyarrow as pa

Record = Literal["sample", "batch"]
Key = Literal["session", "message"]

#: The last byte is the version of the format.
MAGIC = b"RECDLOG\x01"
SYNC_SIZE = 16
#: Shards of a log: their numbers have five digits.
MOST_SHARDS = 99_999

# Of a copy of the header: magic, bytes of the JSON text, CRC-32 of that number and the text.
_PREFIX = struct.Struct("<8sII")
# Of a block: first record, records, bytes before and after compression, CRC-32 of the latter.
_BLOCK = struct.Struct("<QIIII")
_CRC = struct.Struct("<I")
BLOCK_HEADER_SIZE = SYNC_SIZE + _BLOCK.size + _CRC.size

#: Bytes of a block before compression: 1.5 GiB.
LARGEST_BLOCK = 3 << 29

# No header is longer: what reads as a longer one is damaged.
_LONGEST_HEADER = 1 << 24


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself.

    Attributes:
        record: how rows are stored: one after the other, or a record batch a block.
        shard: the number of this shard, from 0.
        key: what decides the shard of a row: its session, or nothing.
        session: the column of the session.
        sync: 16 random bytes that stand before each block of this file.
        schema: columns of the rows, without metadata of the schema itself.
    """

    record: Record
    shard: int
    num_shards: int
    key: Key
    session: str
    sync: bytes
    schema: pa.Schema

    def to_bytes(self) -> bytes:
        """Both copies."""
        text = json.dumps(
            {
                "record": self.record,
                "shard": self.shard,
                "num_shards": self.num_shards,
                "key": self.key,
                "session": self.session,
                "sync": self.sync.hex(),
                "schema": base64.b64encode(self.schema.serialize()).decode(),
            }
        ).encode()
        size = len(text).to_bytes(4, "little")
        return 2 * (_PREFIX.pack(MAGIC, len(text), zlib.crc32(size + text)) + text)


@dataclass(frozen=True)
class FoundHeader:
    """A shard's header, the end of what is whole of it, and the offset of a damaged copy."""

    header: ShardHeader
    end: int
    damaged_at: int | None


def read_header(file: BinaryIO) -> FoundHeader | None:
    """The header from the first whole copy; None where there is none."""
    found = None
    for size in (1 << 16, 2 * _LONGEST_HEADER):
        file.seek(0)
        found = _find_header(file.read(size))
        if found is not None and found.damaged_at is None:
            break
    return found


def _find_header(data: bytes) -> FoundHeader | None:
    first = _copy(data, 0)
    if first is not None:
        header, size = first
        if _copy(data, size) is None:
            return FoundHeader(header, size, size)
        return FoundHeader(header, 2 * size, None)
    at = data.find(MAGIC, 1)
    second = _copy(data, at) if at > 0 else None
    return FoundHeader(second[0], at + second[1], 0) if second else None


def _copy(data: bytes, at: int) -> tuple[ShardHeader, int] | None:
    """The header in the copy at ``at`` and the bytes of that copy, if it is whole."""
    if len(data) < at + _PREFIX.size:
        return None
    magic, size, crc = _PREFIX.unpack_from(data, at)
    text = data[at + _PREFIX.size : at + _PREFIX.size + size]
    if magic != MAGIC or len(text) != size or crc != zlib.crc32(data[at + 8 : at + 12] + text):
        return None
    header = _header(text)
    return None if header is None else (header, _PREFIX.size + size)


def _header(text: bytes) -> ShardHeader | None:
    """The header that a text with the right checksum says, if it is one."""
    try:
        said = json.loads(text)
        header = ShardHeader(
            said["record"],
            said["shard"],
            said["num_shards"],
            said["key"],
            said["session"],
            bytes.fromhex(said["sync"]),
            pa.ipc.read_schema(pa.py_buffer(base64.b64decode(said["schema"]))),
        )
    except (ValueError, TypeError, KeyError, RecursionError, OSError, pa.ArrowException):
        return None
    is_header = (
        header.record in get_args(Record)
        and header.key in get_args(Key)
        and type(header.shard) is type(header.num_shards) is int
        and 0 <= header.shard < header.num_shards <= MOST_SHARDS
        and header.session in header.schema.names
        and len(header.sync) == SYNC_SIZE
    )
    return header if is_header else None


@dataclass(frozen=True)
class BlockHeader:
    """What stands before a block's compressed bytes.

    Attributes:
        first_record: number of the block's first record in its shard, from 0.
        raw_size: bytes before compression.
        size: bytes that follow.
        crc: CRC-32 of these bytes.
    """

    first_record: int
    num_records: int
    raw_size: int
    size: int
    crc: int

    @property
    def end_record(self) -> int:
        return self.first_record + self.num_records

    def is_of(self, payload: bytes) -> bool:
        """Whether these are the bytes that follow, all of them and unchanged."""
        return len(payload) == self.size and zlib.crc32(payload) == self.crc

    def to_bytes(self, sync: bytes) -> bytes:
        fields = sync + _BLOCK.pack(
            self.first_record, self.num_records, self.raw_size, self.size, self.crc
        )
        return fields + _CRC.pack(zlib.crc32(fields))

    @staticmethod
    def parse(data: bytes, sync: bytes) -> BlockHeader | None:
        """The header at the start of ``data``, or None where there is no whole one."""
        if len(data) < BLOCK_HEADER_SIZE or not data.startswith(sync):
            return None
        fields = data[: SYNC_SIZE + _BLOCK.size]
        if _CRC.unpack_from(data, len(fields))[0] != zlib.crc32(fields):
            return None
        return BlockHeader(*_BLOCK.unpack_from(fields, SYNC_SIZE))

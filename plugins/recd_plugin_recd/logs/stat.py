"""``recd logs stat``: what is in the shards of a log, and what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recd_plugin_recd.logs.check import readable_shards
from recd_plugin_recd.logs.damage import Damage
from recd_plugin_recd.logs.shard_files import shard_files
from recd_plugin_recd.logs.shard_format import BlockHeader
from recd_plugin_recd.logs.shard_reader import ShardReader


@dataclass(frozen=True)
class ShardStatistics:
    """Counts of one shard.

    Attributes:
        size: bytes of the file.
        raw_bytes: of the records in whole blocks, before compression.
        damage: what cannot be read.
    """

    path: Path
    blocks: int
    records: int
    size: int
    raw_bytes: int
    damage: tuple[Damage, ...]

    @property
    def ratio(self) -> float:
        """Bytes before compression over bytes of the file."""
        return self.raw_bytes / self.size if self.size else 0.0

    def to_json(self) -> dict[str, Any]:
        """What ``recd logs stat --json`` writes of a shard."""
        return {
            "shard": self.path.name,
            "blocks": self.blocks,
            "records": self.records,
            "bytes": self.size,
            "raw_bytes": self.raw_bytes,
            "ratio": self.ratio,
            "damage": [
                {
                    "offset": damage.offset,
                    "cause": damage.cause,
                    "records_lost": damage.records_lost,
                    "resumes_at": damage.resumes_at,
                }
                for damage in self.damage
            ],
        }


def log_statistics(path: Path) -> list[ShardStatistics]:
    """Read every block of a log, without decompressing it.

    Files that are missing, or wrong as a whole, have their place among the shards.

    Raises:
        DataError: there is no log.
    """
    found: list[Damage] = []
    readable = readable_shards(path, found.append)
    return [
        _statistics(shard, shard in readable, [damage for damage in found if damage.shard == shard])
        for shard in sorted({*shard_files(path), *(damage.shard for damage in found)})
    ]


def _statistics(path: Path, is_readable: bool, damage: list[Damage]) -> ShardStatistics:
    headers: list[BlockHeader] = []
    if is_readable:
        with ShardReader(path, damage.append) as reader:
            headers = [header for _, header, _ in reader.payloads()]
    return ShardStatistics(
        path,
        len(headers),
        sum(header.num_records for header in headers),
        path.stat().st_size if path.exists() else 0,
        sum(header.raw_size for header in headers),
        tuple(damage),
    )

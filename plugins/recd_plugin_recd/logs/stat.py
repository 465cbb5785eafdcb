"""``recd logs stat``: what is in the shards of a log, and what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recd_plugin_recd.logs.damage import Damage
from recd_plugin_recd.logs.shard_files import shard_files
from recd_plugin_recd.logs.shard_reader import ShardReader
from recd_plugins.errors import DataError


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

    Raises:
        DataError: there is no log.
    """
    return [_statistics(shard) for shard in shard_files(path)]


def _statistics(path: Path) -> ShardStatistics:
    damage: list[Damage] = []
    size = path.stat().st_size
    try:
        reader = ShardReader(path, damage.append)
    except DataError as error:
        whole = Damage(path, 0, str(error).removeprefix(f"{path}: "), None, None)
        return ShardStatistics(path, 0, 0, size, 0, (whole,))
    with reader:
        headers = [header for _, header, _ in reader.payloads()]
    return ShardStatistics(
        path,
        len(headers),
        sum(header.num_records for header in headers),
        size,
        sum(header.raw_size for header in headers),
        tuple(damage),
    )

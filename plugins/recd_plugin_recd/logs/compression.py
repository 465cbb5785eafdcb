"""How blocks are compressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zstandard

# The largest window that a decompressor takes without being told to.
_WINDOW_LOG = 27


@dataclass(frozen=True)
class Compression:
    """zstd's level, and whether it looks for repeats all over a block (long-distance matching).

    Without long-distance matching zstd at level 3 sees the last 2 MB.
    """

    level: int = 3
    long_distance: bool = False

    def compressor(self) -> zstandard.ZstdCompressor:
        """A compressor of whole blocks."""
        import zstandard

        if not self.long_distance:
            return zstandard.ZstdCompressor(level=self.level)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            self.level, enable_ldm=True, window_log=_WINDOW_LOG
        )
        return zstandard.ZstdCompressor(compression_params=parameters)

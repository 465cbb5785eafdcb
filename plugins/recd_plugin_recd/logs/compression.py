"""How blocks are compressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recd_plugin_recd.logs.shard_format import LARGEST_BLOCK
from recd_plugins.api import DataError

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


def wrong_frame(data: bytes, size: int) -> str | None:
    """Why a block's bytes are not to be decompressed into ``size`` bytes; None where they are.

    A few bytes of zstd may stand for gigabytes. What its header announces is looked at before any
    memory is taken: exactly ``size``, and no more than a block has.
    """
    import zstandard

    if size > LARGEST_BLOCK:
        return f"the block has {size} bytes before compression; {LARGEST_BLOCK} are the most"
    try:
        announced = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as error:
        return f"the block is no zstd frame ({error})"
    if announced != size:
        known = "no size" if announced == zstandard.CONTENTSIZE_UNKNOWN else f"{announced} bytes"
        return f"the block's zstd frame announces {known}, where its header says {size}"
    return None


def decompressed(data: bytes, size: int) -> bytes:
    """One zstd frame of ``size`` bytes.

    Raises:
        DataError: it is none, or of another size.
    """
    import zstandard

    if (wrong := wrong_frame(data, size)) is not None:
        raise DataError(wrong)
    try:
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise DataError(f"the block cannot be decompressed: {error}") from error
    if len(plain) != size:
        raise DataError(f"{len(plain)} bytes, where {size} were announced")
    return plain

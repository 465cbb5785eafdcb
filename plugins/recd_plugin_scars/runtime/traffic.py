"""What cached tables read and wrote, counted where rows move."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass
class CacheTraffic:
    """What one table's shards on this rank did since the counts were reset.

    A table with several column-wise shards on a rank counts each of them, as each moves its own
    part of a row. Bytes are payload: weights and optimizer state, no row numbers.

    Args:
        batches: forward passes, those without a gradient too.
        lookups: ids looked up.
        unique_rows: distinct rows of a batch, summed over the batches.
        hits: those of them in the fast memory already.
        misses: those read from the backing store.
        weight_bytes_read: from the backing store, of missing rows.
        state_bytes_read: the same of the optimizer state.
        weight_bytes_written: back to the backing store, of rows that left the fast memory.
        state_bytes_written: the same of the optimizer state.
        bytes_loaded: of hot rows, once at the start and once after parameters were written.
        bytes_flushed: of rows that stay in the fast memory, as a checkpoint asks for.
        by_policy: what the policy counts besides, by name.
    """

    batches: int = 0
    lookups: int = 0
    unique_rows: int = 0
    hits: int = 0
    misses: int = 0
    weight_bytes_read: int = 0
    state_bytes_read: int = 0
    weight_bytes_written: int = 0
    state_bytes_written: int = 0
    bytes_loaded: int = 0
    bytes_flushed: int = 0
    by_policy: Counter[str] = field(default_factory=Counter)

    @property
    def bytes_read(self) -> int:
        """Weights and state that batches read."""
        return self.weight_bytes_read + self.state_bytes_read

    @property
    def bytes_written(self) -> int:
        """Weights and state that batches wrote back."""
        return self.weight_bytes_written + self.state_bytes_written

    def __add__(self, other: CacheTraffic) -> CacheTraffic:
        """Of two shards, or of two ranks."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return CacheTraffic(**sums)

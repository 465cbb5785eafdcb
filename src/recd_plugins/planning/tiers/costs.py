"""What a row costs by the strategy of its tier, and from how many accesses on one is cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recd_plugins.errors import SetupError


@dataclass(frozen=True)
class CostOptions:
    """What the model counts with, and what a plan is to reach.

    - ``memory_multiplier`` (M): memory of a data-parallel row in rows. 6 is what TorchRec reserves
      (the row, twice that for the optimizer, three times for DistributedDataParallel) and what
      FlexShard's table 5 was planned with; it is more than is used.
    - ``saved_activations`` (c): copies of an embedding that a data-parallel access saves.
    - ``bytes_per_scalar``: of weights and of gradients that are all-reduced.
      ``activation_bytes``: of activations in memory. ``wire_bytes``: of embeddings and their
      gradients in all-to-alls.
    - ``coalesce``: a row that a batch accesses several times is sent once.
    - ``overlap``: the share of the time of all collectives but the global all-to-all that is
      hidden behind other work, 0 to 1. Nothing hides the global all-to-all of sequences.
    - ``minimise``: ``time`` takes no row into a tier in which it takes more time than it saves;
      ``bytes`` takes all rows that memory allows, for the fewest bytes in the global all-to-all.
    - ``stop``: where the data-parallel tier of ``three_tier`` ends: with the last row that takes
      less memory there than in the flex tier (``dp_flex``) or in the row-wise one (``dp_rw``).
    - ``memory_ratio``: the budget, in parts of what plain row-wise sharding takes (without
      deduplication and coalescing); ``memory_bytes``: the same in bytes of a rank.
    """

    memory_multiplier: float = 6.0
    saved_activations: float = 1.0
    bytes_per_scalar: float = 4.0
    activation_bytes: float = 4.0
    wire_bytes: float = 4.0
    coalesce: bool = False
    overlap: float = 0.0
    minimise: Literal["time", "bytes"] = "time"
    stop: Literal["dp_flex", "dp_rw"] = "dp_flex"
    memory_ratio: float = 1.0
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("memory_multiplier", self.memory_multiplier >= 1),
            ("saved_activations", 0 <= self.saved_activations <= 2),
            ("bytes_per_scalar", self.bytes_per_scalar > 0),
            ("activation_bytes", self.activation_bytes > 0),
            ("wire_bytes", self.wire_bytes > 0),
            ("overlap", 0 <= self.overlap <= 1),
            ("minimise", self.minimise in ("time", "bytes")),
            ("stop", self.stop in ("dp_flex", "dp_rw")),
            ("memory_ratio", self.memory_ratio > 0),
            ("memory_bytes", self.memory_bytes is None or self.memory_bytes > 0),
        ):
            if not allowed:
                raise SetupError(f"{name} cannot be {getattr(self, name)!r}")

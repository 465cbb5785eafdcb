"""``flexshard.two_tier``."""

from __future__ import annotations

from typing import ClassVar, Literal

from recd_plugin_flexshard.tiered import TieredSharding


class TwoTier(TieredSharding):
    """Often read rows of sequence tables on every rank, the others row-wise (FlexShard)."""

    name = "flexshard.two_tier"
    strategy: ClassVar[Literal["two_tier"]] = "two_tier"

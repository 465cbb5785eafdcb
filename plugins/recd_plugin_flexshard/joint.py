"""``flexshard.joint``."""

from __future__ import annotations

from typing import ClassVar, Literal

from recd_plugin_flexshard.tiered import TieredSharding


class Joint(TieredSharding):
    """Two or three tiers of rows, whichever is best for the topology and deduplicated data."""

    name = "flexshard.joint"
    strategy: ClassVar[Literal["joint"]] = "joint"

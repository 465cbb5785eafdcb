"""``flexshard.joint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from recd_plugin_flexshard.tiered import TieredSharding
from recd_plugins.api import Setting, Table


class Joint(TieredSharding):
    """Two or three tiers of rows, whichever is best for the topology and deduplicated data."""

    name = "flexshard.joint"
    strategy: ClassVar[Literal["joint"]] = "joint"

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: Setting) -> Sequence[Mapping[str, Any]]:
        """For sequences, as they come and coalesced; between nodes with more memory, too."""
        if setting.world_size == 1 or any(table.pooled for table in tables):
            return []
        offers: list[dict[str, Any]] = [{}, {"coalesce": True}]
        if setting.nodes > 1:
            # A coalesced table may take more than a plain one before a row is copied.
            offers += [{**each, "budget": "2x"} for each in offers]
        return offers

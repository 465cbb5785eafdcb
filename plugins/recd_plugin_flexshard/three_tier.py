"""``flexshard.three_tier``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from recd_plugin_flexshard.options import TierOptions
from recd_plugin_flexshard.tiered import TieredSharding


class ThreeTier(TieredSharding):
    """Rows of sequence tables on every rank, once in every node, or row-wise (FlexShard)."""

    name = "flexshard.three_tier"
    strategy: ClassVar[Literal["three_tier"]] = "three_tier"

    class Options(TierOptions):
        """Where the first tier ends."""

        stop: Literal["dp_flex", "dp_rw"] = Field(
            default="dp_flex",
            description="The last row on every rank takes less memory there than in the flex tier "
            "(dp_flex), or than row-wise (dp_rw).",
        )

        def cost_options(self) -> dict[str, Any]:
            """See the base class."""
            return {**super().cost_options(), "stop": self.stop}

"""``flexshard.joint``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from recd_plugin_flexshard.options import TierOptions
from recd_plugin_flexshard.tiered import TieredSharding


class Joint(TieredSharding):
    """Two or three tiers of rows, whichever is best for the topology and deduplicated data."""

    name = "flexshard.joint"
    strategy: ClassVar[Literal["joint"]] = "joint"

    class Options(TierOptions):
        """What the best plan is."""

        minimise: Literal["time", "bytes"] = Field(
            default="time",
            description="Seconds of all collectives, or bytes of the all-to-all between all ranks.",
        )
        overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
            default=0.0,
            description="The share of the other collectives' time that other work hides.",
        )

        def cost_options(self) -> dict[str, Any]:
            """See the base class."""
            own = {"minimise": self.minimise, "overlap": self.overlap}
            return {**super().cost_options(), **own}

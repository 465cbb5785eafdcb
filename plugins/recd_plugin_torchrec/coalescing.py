"""The option that all but ``torchrec.data_parallel`` have, whose ids are not sent."""

from __future__ import annotations

from pydantic import Field

from recd_plugins.api import PluginOptions, Sharding


class CoalesceOptions(PluginOptions):
    """What is sent."""

    coalesce: bool = Field(
        default=False, description="Send each id of a table once a batch and rank."
    )


class CoalescingSharding(Sharding):
    """A kind of sharding whose ids may be coalesced."""

    class Options(CoalesceOptions):
        """Only that."""

    options: CoalesceOptions

    @property
    def coalesces(self) -> bool:
        """As the option says."""
        return self.options.coalesce

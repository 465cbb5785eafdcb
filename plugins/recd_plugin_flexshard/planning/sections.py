"""What a topology says for tiers of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from recd_plugin_flexshard.planning.cluster import ClusterShape, Collective, Collectives

if TYPE_CHECKING:
    from recd_plugins.api import Setting
    from recd_plugins.api.planning import CollectiveRates, TopologySpec

#: Its name in a topology.
SECTION = "tiers"


class TierMemory(BaseModel):
    """The section ``tiers`` of a topology: what replicated rows take in memory, measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        description="M: bytes that a replicated row takes on a rank, over those of its weights."
    )
    saved_activations: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = Field(
        description="c: embeddings that a rank need not hold for an access of a replicated row."
    )

    def multiplier(self, world_size: int) -> float:
        """M as the cost model takes it.

        There a replicated row leaves its part of the row-wise table; here it stays in both.
        """
        return self.memory_multiplier + 1 / world_size


def memory_of(known: Setting | TopologySpec) -> TierMemory | None:
    """What replicated rows take there, where it was measured."""
    found = known.sections.get(SECTION)
    assert found is None or isinstance(found, TierMemory), "the package declares it"
    return found


def collectives_of(rates: CollectiveRates) -> Collectives:
    """Rates as the cost model of tiers takes them."""
    return Collectives(
        **{name: Collective(rate.bytes_per_second, rate.seconds) for name, rate in rates}
    )


def cluster_of(setting: Setting) -> ClusterShape:
    """The ranks, as the cost model of tiers takes them."""
    rates = collectives_of(setting.rates)
    return ClusterShape(setting.nodes, setting.ranks_per_node, setting.batch_size, rates)

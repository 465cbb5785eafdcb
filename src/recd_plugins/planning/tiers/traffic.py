"""What a step sends by tier, as ``CollectiveBytes`` counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recd_plugins.planning.tiers.plan import TierPlan

Tier = Literal["cold", "hot", "flex", "flex_gradients"]
TIERS: tuple[Tier, ...] = ("cold", "hot", "flex", "flex_gradients")


@dataclass(frozen=True)
class TierTraffic:
    """The collective of a tier in a step: bytes that a rank sends to others, mean over ranks.

    ``integer_bytes``: ids and lengths; ``float_bytes``: embeddings and gradients, forward and
    backward; ``seconds``: the cost model's.
    """

    collective: Literal["all_to_all", "all_reduce"]
    group: Literal["global", "node", "cross"]
    integer_bytes: float
    float_bytes: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.integer_bytes + self.float_bytes


def traffic(plan: TierPlan) -> dict[Tier, TierTraffic]:
    """What each tier of ``plan`` sends in a step."""
    raise NotImplementedError

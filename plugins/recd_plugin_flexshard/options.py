"""Options of the sharding plugins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from recd_plugins.api import AccessOptions, text_utils

Count = Annotated[StrictInt, Field(gt=0)]
_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)\s*[xX]")


def read_budget(budget: Any) -> dict[str, float]:
    """Return a budget as ``memory_ratio`` or ``memory_bytes`` of ``CostOptions``."""
    if budget == "memory_neutral":
        return {"memory_ratio": 1.0}
    if isinstance(budget, str) and (multiple := _MULTIPLE.fullmatch(budget.strip())):
        if ratio := float(multiple[1]):
            return {"memory_ratio": ratio}
    elif isinstance(budget, str | int):
        try:
            return {"memory_bytes": float(text_utils.read_bytes(budget))}
        except ValueError:
            pass
    raise ValueError(
        f"{budget!r} is no budget; write memory_neutral, a multiple of row-wise memory as 1.5x, or "
        "bytes as 2GiB"
    )


class OtherCluster(BaseModel):
    """A cluster to plan tiers for, in place of the one that trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topology: str = Field(
        default="machine",
        description="Name or file of a topology, as recd plan --topology takes it.",
    )
    nodes: Count | None = Field(default=None, description="Nodes; null takes the topology's.")
    ranks_per_node: Count | None = Field(
        default=None, description="Ranks of a node; null takes the topology's."
    )
    batch_size: Count | None = Field(
        default=None, description="Rows of a rank; null takes training.batch_size."
    )


class TierOptions(AccessOptions):
    """Options of all three plugins."""

    budget: str | Annotated[StrictInt, Field(gt=0)] = Field(
        default="memory_neutral",
        description="Memory of a rank for these tables: memory_neutral (what plain row-wise "
        "takes), a multiple of that as 1.5x, or bytes as 2GiB.",
    )
    memory_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        default=None,
        description="M: memory that a copied row takes, over that of its weights; null takes what "
        "the topology has measured, else 6.",
    )
    saved_activations: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        default=None,
        description="c: embeddings that need not be held for a read of a row that is on every "
        "rank; null takes what the topology has measured, else 1.",
    )
    dedupe: Literal["data", "none"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default="data",
        description="Dedupe factors to plan with: those of the data, none, or one number.",
    )
    minimise: Literal["time", "bytes"] = Field(
        default="time",
        description="Seconds of all collectives: no row goes where it takes more time than it "
        "saves; or bytes of the all-to-all between all ranks.",
    )
    sync: Literal["auto", "dense", "sparse"] = Field(
        default="auto",
        description="How gradients of copies are summed: of all rows (dense), of those that a step "
        "touches (sparse), or of each tier as costs less.",
    )
    coalesce: bool = Field(
        default=False,
        description="Send each id of a table once a batch and rank, and plan with that.",
    )
    overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0,
        description="The share of the other collectives' time that other work hides.",
    )
    retier_every: Count | None = Field(
        default=None,
        description="Choose the rows of the tiers anew after so many steps, from the reads in "
        "them; null keeps them.",
    )
    plan_for: OtherCluster | None = Field(
        default=None,
        description="Choose the tiers for this cluster, whatever trains; null: for what trains.",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _budget_is_known(cls, value: Any) -> Any:
        read_budget(value)
        return value

    def cost_options(self) -> dict[str, Any]:
        """Return fields of ``CostOptions``."""
        return {
            **read_budget(self.budget),
            "minimise": self.minimise,
            "overlap": self.overlap,
            "coalesce": self.coalesce,
            "sync": self.sync,
        }

"""Options of the tier plugins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from recd_plugins.api import AccessOptions, text_utils

Count = Annotated[StrictInt, Field(gt=0)]
_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)\s*[xX]")


def read_budget(budget: Any) -> dict[str, float]:
    """Parse a budget into ``memory_ratio`` or ``memory_bytes`` of ``CostOptions``."""
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
    """A cluster to plan tiers for, instead of the one that trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topology: str = Field(
        default="machine",
        description="Name or file of a topology, as for recd plan --topology.",
    )
    nodes: Count | None = Field(
        default=None, description="Number of nodes; null uses the topology's."
    )
    ranks_per_node: Count | None = Field(
        default=None, description="Ranks per node; null uses the topology's."
    )
    batch_size: Count | None = Field(
        default=None, description="Rows per rank; null uses training.batch_size."
    )


class TierOptions(AccessOptions):
    """Options shared by all three tier plugins."""

    budget: str | Annotated[StrictInt, Field(gt=0)] = Field(
        default="memory_neutral",
        description=(
            "Memory budget of a rank for these tables: memory_neutral (the same as "
            "plain row-wise), a multiple of that such as 1.5x, or bytes such as "
            "2GiB."
        ),
    )
    memory_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=6.0,
        description="M: memory of a copied row divided by the memory of its weights.",
    )
    saved_activations: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = Field(
        default=1.0,
        description=(
            "c: embeddings that need not be held per access to a row with a copy on every rank."
        ),
    )
    dedupe: Literal["data", "none"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default="data",
        description=(
            "Deduplication factors to plan with: measured from the data, none, or one number."
        ),
    )
    minimise: Literal["time", "bytes"] = Field(
        default="time",
        description=(
            "Goal of the plan. time: seconds of all collectives; a row gets no copy "
            "that costs more time than it saves. bytes: the bytes of the all-to-all "
            "between all ranks."
        ),
    )
    sync: Literal["auto", "dense", "sparse"] = Field(
        default="auto",
        description=(
            "How gradients of copies are summed: for all rows (dense), only for "
            "rows that a step touches (sparse), or whichever is cheaper for each "
            "tier."
        ),
    )
    coalesce: bool = Field(
        default=False,
        description=(
            "Send each distinct id of a table once per batch and rank, and plan accordingly."
        ),
    )
    overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0,
        description="Share of the other collectives' time that compute hides.",
    )
    retier_every: Count | None = Field(
        default=None,
        description=(
            "Choose the tiers' rows again after so many steps, from recent "
            "accesses. null keeps the rows."
        ),
    )
    plan_for: OtherCluster | None = Field(
        default=None,
        description="Plan the tiers for this cluster. null uses the cluster that trains.",
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
            "memory_multiplier": self.memory_multiplier,
            "saved_activations": self.saved_activations,
        }

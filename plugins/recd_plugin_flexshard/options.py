"""Options of the tier plugins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from recd_plugins.api import AccessOptions, text_utils

Count = Annotated[StrictInt, Field(gt=0)]
_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)\s*[xX]")


def read_budget(budget: Any) -> dict[str, float]:
    """Parse the option ``budget`` into ``memory_ratio`` or ``memory_bytes`` of ``CostOptions``."""
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
        f"{budget!r} is not a valid budget. Use memory_neutral, a multiple of row-wise memory such "
        "as 1.5x, or bytes such as 2GiB."
    )


class OtherCluster(BaseModel):
    """The option ``plan_for``: a cluster to plan for, instead of the cluster that trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topology: str = Field(
        default="machine",
        description="Name or file of a topology, as for recd plan --topology.",
    )
    nodes: Count | None = Field(
        default=None, description="Number of nodes; null uses the number in the topology."
    )
    ranks_per_node: Count | None = Field(
        default=None, description="Ranks per node; null uses the number in the topology."
    )
    batch_size: Count | None = Field(
        default=None, description="Rows per rank; null uses training.batch_size."
    )


class TierOptions(AccessOptions):
    """Options shared by all three tier plugins."""

    budget: str | Annotated[StrictInt, Field(gt=0)] = Field(
        default="memory_neutral",
        description=(
            "Memory budget of a rank for these tables: memory_neutral (as much as plain "
            "row-wise sharding), a multiple of row-wise memory such as 1.5x, or bytes such "
            "as 2GiB."
        ),
    )
    memory_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=6.0,
        description="M: memory of a copied row divided by the memory of its weights.",
    )
    saved_activations: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = Field(
        default=1.0,
        description=(
            "c: number of embeddings that a rank saves in memory for each lookup of a row with a "
            "copy on every rank."
        ),
    )
    dedupe: Literal["data", "none"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default="data",
        description=(
            "Deduplication factors to plan with: data measures them, none assumes 1, and a number "
            "is used for all tables."
        ),
    )
    minimise: Literal["time", "bytes"] = Field(
        default="time",
        description=(
            "Quantity to minimise. time: the time of all collectives; a row gets a copy only "
            "if that saves time. bytes: the bytes of the all-to-all between all ranks."
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
        description=(
            "Fraction of communication time that overlaps with compute, for all collectives "
            "except the all-to-all between all ranks."
        ),
    )
    retier_every: Count | None = Field(
        default=None,
        description=(
            "Number of steps after which rows are assigned to tiers again, based on recent "
            "lookups. null never changes the assignment."
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
        """Return these options as keyword arguments of ``CostOptions``."""
        return {
            **read_budget(self.budget),
            "minimise": self.minimise,
            "overlap": self.overlap,
            "coalesce": self.coalesce,
            "sync": self.sync,
            "memory_multiplier": self.memory_multiplier,
            "saved_activations": self.saved_activations,
        }

"""Options of the flexshard plugins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from recd_plugins.api import AccessOptions, text_utils

Count = Annotated[StrictInt, Field(gt=0)]
_MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)\s*[xX]")


def read_budget(budget: Any) -> dict[str, float]:
    """Parse the option ``budget``, such as ``1.5x`` or ``2GiB``.

    Returns a dict with one entry, ``memory_ratio`` or ``memory_bytes``.
    """
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
        f"{budget!r} is not a valid budget. Use 'memory_neutral', a multiple of row-wise memory "
        "such as 1.5x, or bytes such as 2GiB."
    )


class OtherCluster(BaseModel):
    """Option ``plan_for``: the cluster to plan for, if it differs from the training cluster."""

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
    """Options of the three flexshard plugins."""

    budget: str | Annotated[StrictInt, Field(gt=0)] = Field(
        default="memory_neutral",
        description=(
            "Memory budget of a rank for these tables. memory_neutral: as much as TorchRec's "
            "row-wise sharding. Or a multiple of that memory such as 1.5x, or bytes such as 2GiB."
        ),
    )
    memory_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=6.0,
        description="M: memory of a copied row divided by the memory of its weights.",
    )
    saved_activations: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = Field(
        default=1.0,
        description=(
            "c: embeddings that a rank does not need to store, per lookup of a row with a copy "
            "on every rank."
        ),
    )
    dedupe: Literal["data", "none"] | Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default="data",
        description=(
            "Deduplication factor of the tables in cost estimates. data: measure the factor of "
            "each table. none: assume 1. A number: use this factor for all tables."
        ),
    )
    minimise: Literal["time", "bytes"] = Field(
        default="time",
        description=(
            "Quantity to minimise. time: the time of all collectives, with copies only where "
            "they save time. bytes: the bytes of the all-to-all between all ranks."
        ),
    )
    sync: Literal["auto", "dense", "sparse"] = Field(
        default="auto",
        description=(
            "How gradients of copies are summed over ranks. dense: for all copied rows. sparse: "
            "only for rows that a step looks up. auto: the cheaper one."
        ),
    )
    coalesce: bool = Field(
        default=False,
        description=("Send each distinct id of a table once per batch and rank."),
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
            "Number of steps after which the rows to copy are chosen again, based on recent "
            "lookups. null keeps the rows."
        ),
    )
    plan_for: OtherCluster | None = Field(
        default=None,
        description="Choose the rows to copy for this cluster. null uses the training cluster.",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _budget_is_known(cls, value: Any) -> Any:
        read_budget(value)
        return value

    def cost_options(self) -> dict[str, Any]:
        """Return the options of the cost model as keyword arguments of ``CostOptions``."""
        return {
            **read_budget(self.budget),
            "minimise": self.minimise,
            "overlap": self.overlap,
            "coalesce": self.coalesce,
            "sync": self.sync,
            "memory_multiplier": self.memory_multiplier,
            "saved_activations": self.saved_activations,
        }

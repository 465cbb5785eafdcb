"""Options that the three plugins share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator

from recd_plugin_flexshard.budget import read_budget
from recd_plugins.api.access import AccessOptions

Count = Annotated[StrictInt, Field(gt=0)]
DedupeFactor = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class OtherCluster(BaseModel):
    """What tiers are planned for where that is not what trains."""

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
    """Where accesses are counted, what tiers are to save, and how much memory they may take."""

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
    dedupe: Literal["data", "none"] | DedupeFactor | dict[str, DedupeFactor] = Field(
        default="data",
        description="Dedupe factors to plan with: those of the data, none, one number, or numbers "
        "by feature.",
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

    @field_validator("dedupe", mode="wrap")
    @classmethod
    def _dedupe_is_known(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:  # one problem for each form that it might have had
            raise ValueError(
                "write data, none, one number from 1 on, or such numbers by feature as "
                f"{{seq_0_0: 4}}; got {value!r}"
            ) from error

    def cost_options(self) -> dict[str, Any]:
        """Fields of the cost model's options."""
        return {
            **read_budget(self.budget),
            "minimise": self.minimise,
            "overlap": self.overlap,
            "coalesce": self.coalesce,
            "sync": self.sync,
        }

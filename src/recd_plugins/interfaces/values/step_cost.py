"""The work of one training step on a rank, which rates turn into seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class StepCost:
    """One step of one rank, forward and backward.

    Attributes:
        steps: 1, for the fixed cost of a step.
        ids_looked_up: ids of its lookups; an id counts once for each column shard.
        bytes_looked_up: embeddings that these ids read.
        rows_updated: distinct rows of its tables that learn.
        lookups: kernel calls: one for the tables of a module that are sharded alike.
        bytes_from_host: of cached tables, moved from host memory and back.
        bytes_from_file: the same from files.
        collectives: of the input dist and output dist.
        bytes_in_node: sent to ranks of its node in them.
        bytes_across_nodes: sent to ranks of other nodes.
        bytes_reduced: gradients that it sends to sum them up.
        matmul_flops: operations of matrix products.
        attention_flops: operations of torch's fused attention.
        element_bytes: read and written by all other operators.
        operators: torch operators beside matrix products.
        ids_made_unique: ids that coalescing looks at.
    """

    steps: float = 1.0
    ids_looked_up: float = 0.0
    bytes_looked_up: float = 0.0
    rows_updated: float = 0.0
    lookups: float = 0.0
    bytes_from_host: float = 0.0
    bytes_from_file: float = 0.0
    collectives: float = 0.0
    bytes_in_node: float = 0.0
    bytes_across_nodes: float = 0.0
    bytes_reduced: float = 0.0
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    element_bytes: float = 0.0
    operators: float = 0.0
    ids_made_unique: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        """Return both in one step."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return StepCost(**{**sums, "steps": 1.0})

    def __mul__(self, share: float) -> StepCost:
        """Return a part of it, in one step."""
        parts = {f.name: getattr(self, f.name) * share for f in fields(self)}
        return StepCost(**{**parts, "steps": 1.0})


# More, 11 days for one of anything, is a mistake.
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
# Rates of earlier versions, which topologies of old checkpoints have.
_RETIRED = {
    *("rows_updated_by_fbgemm", "sequence_rows_updated_by_fbgemm", "tables_looked_up"),
    *("rows_looked_up", "products", "matmul_bytes", "attention_queries", "bytes_waited_for"),
    *("ids_read", "idle", "idle_links", "spared"),
}


class _Rates(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_retired(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in _RETIRED}


class StageCost(_Rates):
    """Seconds for one of each; the fields are those of ``StepCost``."""

    steps: Seconds = Field(default=0.0, description="For a step, however little it does.")

    def seconds(self, cost: StepCost) -> float:
        """Return what this stage of a step takes."""
        return sum(getattr(self, name) * getattr(cost, name) for name in type(self).model_fields)


class LookupCost(StageCost):
    """Embedding lookups, forward and backward."""

    bytes_looked_up: Seconds = Field(default=0.0, description="For a byte of embeddings.")
    ids_looked_up: Seconds = Field(default=0.0, description="For an id.")
    rows_updated: Seconds = Field(default=0.0, description="For a distinct row that learns.")
    lookups: Seconds = Field(default=0.0, description="For a kernel call.")
    bytes_from_host: Seconds = Field(
        default=0.0, description="For a byte that a cached table moves from host memory or back."
    )
    bytes_from_file: Seconds = Field(default=0.0, description="For one from a file or back.")


class GemmCost(StageCost):
    """Matrix products and attention, forward and backward."""

    matmul_flops: Seconds = Field(default=0.0, description="For an operation of a product.")
    attention_flops: Seconds = Field(default=0.0, description="For one of fused attention.")


class AllToAllCost(StageCost):
    """Input dist and output dist."""

    collectives: Seconds = Field(default=0.0, description="For a collective.")
    bytes_in_node: Seconds = Field(default=0.0, description="For a byte sent in the node.")
    bytes_across_nodes: Seconds = Field(default=0.0, description="For one sent to another node.")


class AllReduceCost(StageCost):
    """All-reduces of dense gradients."""

    bytes_reduced: Seconds = Field(default=0.0, description="For a byte sent.")


class OtherCost(StageCost):
    """All else."""

    element_bytes: Seconds = Field(default=0.0, description="For a byte read or written.")
    operators: Seconds = Field(default=0.0, description="For an operator, however little it does.")
    ids_made_unique: Seconds = Field(
        default=0.0, description="For an id that coalescing makes unique."
    )


class StageCosts(_Rates):
    """The section ``costs`` of a topology."""

    lookup: LookupCost = LookupCost()
    gemm: GemmCost = GemmCost()
    all_to_all: AllToAllCost = AllToAllCost()
    all_reduce: AllReduceCost = AllReduceCost()
    other: OtherCost = OtherCost()
    hidden: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Share of an all-reduce that computing beside it hides."
    )
    alone: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Share of its time that a rank takes while the others wait: less than 1 if "
        "ranks share processors.",
    )

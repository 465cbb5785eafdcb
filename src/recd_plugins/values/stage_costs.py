"""What the stages of a step cost on some machine, for each of what its work consists of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from recd_plugins.values.work import Work

# More, 11 days for one of anything, is a mistake; sums of far more are no numbers.
_MOST = 1e6
Seconds = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)]


class StageCost(BaseModel):
    """Seconds for one of each: the fields are those of ``Work``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Seconds = Field(default=0.0, description="For a step, however little it does.")

    def seconds(self, work: Work) -> float:
        """What this stage of ``work`` takes."""
        return sum(getattr(self, name) * getattr(work, name) for name in type(self).model_fields)


class LookupCost(StageCost):
    """Embedding lookups, forward and backward."""

    bytes_looked_up: Seconds = Field(default=0.0, description="For a byte of embeddings.")
    ids_looked_up: Seconds = Field(default=0.0, description="For an id.")
    rows_updated: Seconds = Field(
        default=0.0, description="For a row that learns, whatever number of ids it has."
    )
    rows_updated_by_fbgemm: Seconds = Field(
        default=0.0,
        description="Beside that, where FBGEMM's own row-wise Adagrad does it on a CPU.",
    )
    sequence_rows_updated_by_fbgemm: Seconds = Field(
        default=0.0, description="Beside both, where the row is of a sequence, which is not pooled."
    )
    lookups: Seconds = Field(
        default=0.0,
        description="For a call of a kernel, however little it looks up, and what is around it.",
    )
    tables_looked_up: Seconds = Field(default=0.0, description="For a table or a shard of one.")
    rows_looked_up: Seconds = Field(
        default=0.0, description="For a row of a deduplicated batch in a pooling lookup."
    )
    bytes_from_host: Seconds = Field(
        default=0.0, description="For a byte that a cached table moves from host memory or back."
    )
    bytes_from_file: Seconds = Field(default=0.0, description="For one from a file or back.")


class GemmCost(StageCost):
    """Matrix products and attention, forward and backward."""

    products: Seconds = Field(default=0.0, description="For a matrix product, however small.")
    matmul_flops: Seconds = Field(default=0.0, description="For an operation of one.")
    matmul_bytes: Seconds = Field(
        default=0.0, description="For a byte of the factors and the result of one."
    )
    attention_flops: Seconds = Field(default=0.0, description="For one of fused attention.")
    attention_queries: Seconds = Field(
        default=0.0, description="For a position of a head, however many it looks at."
    )


class AllToAllCost(StageCost):
    """Input dist and output dist."""

    collectives: Seconds = Field(default=0.0, description="For a collective.")
    bytes_in_node: Seconds = Field(default=0.0, description="For a byte sent in the node.")
    bytes_across_nodes: Seconds = Field(default=0.0, description="For one sent to another node.")
    bytes_waited_for: Seconds = Field(
        default=0.0,
        description="For one that a link carries beside what links carry in the mean; as one sent "
        "to another node where it is not said.",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_others(cls, values: Any) -> Any:
        """What files have not that were written before it was measured."""
        if not isinstance(values, dict):
            return values
        across = values.get("bytes_across_nodes")
        if isinstance(across, (int, float)) and 0 <= across <= _MOST:  # else that is told
            return {"bytes_waited_for": across, **values}
        return values


class AllReduceCost(StageCost):
    """All-reduces of dense gradients."""

    bytes_reduced: Seconds = Field(default=0.0, description="For a byte sent.")


class OtherCost(StageCost):
    """All else."""

    element_bytes: Seconds = Field(default=0.0, description="For a byte read or written.")
    operators: Seconds = Field(default=0.0, description="For an operator, however little it does.")
    ids_read: Seconds = Field(default=0.0, description="For an id that the loader converts.")
    ids_made_unique: Seconds = Field(
        default=0.0, description="For an id that coalescing makes unique."
    )


class StageCosts(BaseModel):
    """What the stages of a step cost on some machine: the section ``costs`` of a topology."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lookup: LookupCost = LookupCost()
    gemm: GemmCost = GemmCost()
    all_to_all: AllToAllCost = AllToAllCost()
    all_reduce: AllReduceCost = AllReduceCost()
    other: OtherCost = OtherCost()
    hidden: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="Share of an all-reduce that is over when ranks have computed beside it.",
    )
    alone: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Of what a rank computes while all do, the share that it takes while the "
        "others wait: less than 1 where they share processors.",
    )
    idle: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="Of a collective, however small, the share in which processors have nothing "
        "to do: ranks that share them compute meanwhile.",
    )
    idle_links: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="The same of bytes between nodes: less than 1 where processors carry them.",
    )
    spared: Seconds = Field(
        default=0.0,
        description="Of a collective between nodes that ranks come to from computing: links that "
        "were idle let some bytes through at once.",
    )

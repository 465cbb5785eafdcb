"""Cost model of a training step: amounts of work, and seconds per unit of work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class StepCost:
    """Amounts of work of one rank in one training step, forward and backward.

    Attributes:
        steps: number of steps, for the fixed cost of a step.
        ids_looked_up: number of looked-up ids, counted once per column shard.
        bytes_looked_up: bytes of looked-up embeddings.
        rows_updated: number of distinct rows that the optimizer updates.
        lookups: number of lookup kernel calls, one per module and sharding type.
        bytes_from_host: bytes copied between cached tables and host memory.
        bytes_from_file: bytes copied between cached tables and files.
        collectives: number of collectives in TorchRec's input dist and output dist.
        bytes_in_node: bytes that these collectives send to ranks of the same node.
        bytes_across_nodes: bytes that these collectives send to other nodes.
        bytes_reduced: bytes of gradients in all-reduces.
        matmul_flops: floating-point operations of matrix products and attention.
        element_bytes: bytes that other operators read and write.
        operators: number of other operators.
        ids_made_unique: number of ids that are deduplicated before the all-to-all.
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
    element_bytes: float = 0.0
    operators: float = 0.0
    ids_made_unique: float = 0.0


# At most 11 days per unit.
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
# Rates of earlier versions, which topologies in old checkpoints contain.
_RETIRED = {
    *("rows_updated_by_fbgemm", "sequence_rows_updated_by_fbgemm", "tables_looked_up"),
    *("rows_looked_up", "products", "matmul_bytes", "attention_queries", "bytes_waited_for"),
    *("ids_read", "idle", "idle_links", "spared", "attention_flops"),
    *("hidden", "alone"),
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
    """Seconds per unit of work of one stage, for fields of ``StepCost``."""

    steps: Seconds = Field(default=0.0, description="Fixed seconds per step.")

    def seconds(self, cost: StepCost) -> float:
        """Return the estimated seconds of this stage for the given amounts of work."""
        return sum(getattr(self, name) * getattr(cost, name) for name in type(self).model_fields)


class LookupCost(StageCost):
    """Seconds per unit of work in embedding lookups."""

    bytes_looked_up: Seconds = Field(default=0.0, description="Seconds per byte of embeddings.")
    ids_looked_up: Seconds = Field(default=0.0, description="Seconds per id.")
    rows_updated: Seconds = Field(default=0.0, description="Seconds per distinct updated row.")
    lookups: Seconds = Field(default=0.0, description="Seconds per kernel call.")
    bytes_from_host: Seconds = Field(
        default=0.0, description="Seconds per byte between a cached table and host memory."
    )
    bytes_from_file: Seconds = Field(
        default=0.0, description="Seconds per byte between a cached table and a file."
    )


class GemmCost(StageCost):
    """Seconds per unit of work in matrix products and attention."""

    matmul_flops: Seconds = Field(default=0.0, description="Seconds per floating-point operation.")


class AllToAllCost(StageCost):
    """Seconds per unit of work in the collectives of TorchRec's input dist and output dist."""

    collectives: Seconds = Field(default=0.0, description="Seconds per collective.")
    bytes_in_node: Seconds = Field(
        default=0.0, description="Seconds per byte sent within the node."
    )
    bytes_across_nodes: Seconds = Field(
        default=0.0, description="Seconds per byte sent to another node."
    )


class AllReduceCost(StageCost):
    """Seconds per unit of work in all-reduces of dense gradients."""

    bytes_reduced: Seconds = Field(default=0.0, description="Seconds per byte sent.")


class OtherCost(StageCost):
    """Seconds per unit of work in operators of no other stage, such as element-wise ones."""

    element_bytes: Seconds = Field(default=0.0, description="Seconds per byte read or written.")
    operators: Seconds = Field(default=0.0, description="Fixed seconds per operator.")
    ids_made_unique: Seconds = Field(
        default=0.0, description="Seconds per id that coalescing makes unique."
    )


class StageCosts(_Rates):
    """Cost rates of all stages of a step, the section ``costs`` of a topology file."""

    lookup: LookupCost = LookupCost()
    gemm: GemmCost = GemmCost()
    all_to_all: AllToAllCost = AllToAllCost()
    all_reduce: AllReduceCost = AllReduceCost()
    other: OtherCost = OtherCost()


_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CollectiveRate(BaseModel):
    """Latency and bandwidth of a collective.

    The bandwidth counts the input bytes of one rank, as in FlexShard's cost model (arXiv
    2301.02959).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes_per_second: _Rate = Field(description="Bytes per second of one rank.")
    seconds: _Seconds = Field(default=0.0, description="Latency in seconds.")


class CollectiveRates(BaseModel):
    """Speed of collectives in a cluster, the section ``collectives`` of a topology file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a2a_global: CollectiveRate = Field(description="All-to-all of all ranks.")
    a2a_intra: CollectiveRate = Field(description="All-to-all of the ranks of a node.")
    ar_global: CollectiveRate = Field(description="All-reduce of all ranks.")
    ar_cross: CollectiveRate = Field(
        description="All-reduces across nodes of ranks with equal local rank, all at the same time."
    )


#: Stage of a training step (RecD, figure 8).
Stage = Literal["lookup", "gemm", "all_to_all", "all_reduce", "other"]
#: All stages, in the order of reports.
STAGES: tuple[Stage, ...] = ("lookup", "gemm", "all_to_all", "all_reduce", "other")


@dataclass(frozen=True)
class StageTimes:
    """Wall-clock seconds of each stage of a training step.

    Attributes:
        lookup: embedding lookups, forward and backward with the fused optimizer.
        gemm: matrix products and attention, forward and backward.
        all_to_all: collectives and copies in input dist and output dist, including reduce-scatters.
        all_reduce: collectives and copies of DistributedDataParallel.
        other: everything else, including reading batches and the dense optimizer.
    """

    lookup: float
    gemm: float
    all_to_all: float
    all_reduce: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of all stages together."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[Stage, float]:
        """Return a dict from stage to seconds."""
        return asdict(self)  # type: ignore[return-value]

    def scaled(self, total: float) -> Self:
        """Return a copy in which all times are scaled so that their sum is ``total``."""
        factor = total / self.total if self.total else 0.0
        return type(self)(**{stage: value * factor for stage, value in self.as_dict().items()})

    @classmethod
    def mean(cls, times: Sequence[Self]) -> Self:
        """Return the mean time of each stage over several ranks or steps."""
        return cls(**{s: sum(getattr(each, s) for each in times) / len(times) for s in STAGES})


# Operators, autograd nodes and TorchRec's regions (1.6 to 1.9) on the training thread, and kernels
# on a device. The first match counts.
_RULES: tuple[tuple[Stage, str], ...] = (
    (
        "all_to_all",
        r"\[(input_dist|splits_dist|output_dist|output_dist_wait|input_dist_wait)\]"
        r"|All2All|ReduceScatter|AllGatherBase|_Tier(Send|Receive|Merge)(Backward)?$"
        r"|## (all2all|variable_batch_all2all|reduce_scatter|all_gather)"
        r"|## (start|wait)_sparse_data_dist|## (Fused)?KJT\w*Awaitable wait"
        r"|c10d::_?(alltoall|reduce_scatter|allgather)"
        r"|c10d_functional::(all_to_all|reduce_scatter|all_gather|wait_tensor)"
        r"|torchrec::(reduce_scatter|all_gather)"
        r"|ncclDevKernel_(SendRecv|ReduceScatter|AllGather)",
    ),
    (
        "all_reduce",
        r"c10d::((all)?reduce_|_?broadcast)|c10d_functional::(all_reduce|broadcast)"
        r"|distributed::reducer|ncclDevKernel_(AllReduce|Broadcast)",
    ),
    (
        "lookup",
        r"\[lookup\]|split_embedding|dense_embedding|\w*LookupFunction"
        r"|bounds_check_indices|generate_vbe_metadata|_TierLookup(Backward)?$"
        r"|aten::_?embedding|Embedding(Bag)?Backward",
    ),
    (
        "gemm",
        r"^aten::(mm|addmm|_addmm_activation|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|linear|matmul)$"
        r"|^aten::_?scaled_dot_product|^aten::_(flash|efficient)_attention|^aten::_scaled_mm"
        r"|^fbgemm::(jagged_dense_bmm|jagged_jagged_bmm|\w*jagged_2d_mul)"
        r"|^(void )?(cutlass|cublas|gemv|gemm|flash|fmha|sm\d+_xmma|ampere_|nvjet|pytorch_flash)",
    ),
)
_PATTERNS = [(stage, re.compile(pattern)) for stage, pattern in _RULES]


@lru_cache(maxsize=4096)
def stage_of(name: str) -> Stage | None:
    """Return the stage of a profiler event's name; None if the enclosing event decides."""
    return next((stage for stage, pattern in _PATTERNS if pattern.search(name)), None)


CollectiveKind = Literal[
    "all_to_all", "reduce_scatter", "all_gather", "all_reduce", "broadcast", "other"
]
#: Process group name and collective kind, whose bytes are counted separately.
Channel = tuple[str, CollectiveKind]

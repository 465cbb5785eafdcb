"""The work of one training step on a rank, which rates turn into seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, Self, get_args

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
        matmul_flops: operations of matrix products and attention.
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
    *("ids_read", "idle", "idle_links", "spared", "attention_flops"),
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

    matmul_flops: Seconds = Field(
        default=0.0, description="For an operation of a product or of attention."
    )


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


_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_BETWEEN_NODES = ("a2a_global", "ar_global", "ar_cross")


class CollectiveRate(BaseModel):
    """Seconds of one collective: a latency, and bytes over a bandwidth.

    Bytes are those of FlexShard's cost model (arXiv 2301.02959): of an all-to-all all that a rank
    puts in, its own share too; of an all-reduce the tensor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes_per_second: _Rate = Field(description="Of one rank.")
    seconds: _Seconds = Field(default=0.0, description="However few the bytes are.")


class Links(Protocol):
    """Ranks and what links them, as a topology says: bandwidths are bytes a second, one way."""

    ranks_per_node: int
    nodes: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float


class CollectiveRates(BaseModel):
    """The section ``collectives`` of a topology."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a2a_global: CollectiveRate = Field(description="All-to-all of all ranks.")
    a2a_intra: CollectiveRate = Field(description="All-to-all of the ranks of a node.")
    ar_global: CollectiveRate = Field(description="All-reduce of all ranks.")
    ar_cross: CollectiveRate = Field(
        description="All-reduce of ranks with the same place in their nodes, all at once."
    )

    @classmethod
    def of_topology(cls, topology: Links) -> Self:
        """Bounds: the busiest link decides, nothing has a latency, and no rank waits.

        Of what a rank of U = N x W ranks puts into an all-to-all, (U - W) / U go through its
        network and (W - 1) / U through its node. All-reduces move 2 (n - 1) / n of the tensor; one
        of all ranks reduces in the node, then a W-th of the tensor across nodes. A group of one
        rank counts as if its link carried everything once.
        """
        ranks, nodes = topology.ranks_per_node, topology.nodes
        world = ranks * nodes
        intra, inter = topology.intra_node_bandwidth, topology.inter_node_bandwidth

        def rate(in_node: float, across: float) -> CollectiveRate:
            """The rate where for a byte put in so many are sent through either link."""
            seconds = max(in_node / intra, across / inter)
            return CollectiveRate(bytes_per_second=1 / (seconds or 1 / intra))

        return cls(
            a2a_global=rate((ranks - 1) / world, (world - ranks) / world),
            a2a_intra=rate((ranks - 1) / ranks, 0),
            ar_global=rate(2 * (ranks - 1) / ranks, 2 * (nodes - 1) / world),
            ar_cross=rate(0, 2 * (nodes - 1) / nodes or 1),
        )

    def within(self, bounds: CollectiveRates) -> Self:
        """The same, with none between nodes faster than its bound.

        Links that are limited let some bytes through at once, and few rounds may see those alone.
        """

        def least(name: str) -> CollectiveRate:
            rate, bound = getattr(self, name), getattr(bounds, name)
            fastest = min(rate.bytes_per_second, bound.bytes_per_second)
            return CollectiveRate(bytes_per_second=fastest, seconds=rate.seconds)

        return self.model_copy(update={name: least(name) for name in _BETWEEN_NODES})


#: What a moment of a step is spent on.
Stage = Literal["lookup", "gemm", "all_to_all", "all_reduce", "other"]
#: All stages, in the order of reports.
STAGES: tuple[Stage, ...] = ("lookup", "gemm", "all_to_all", "all_reduce", "other")


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one step of one rank by stage; they sum to the step's wall time.

    The paper's figure 8 has the all-reduce of dense gradients within ``other``.

    Attributes:
        lookup: embedding lookups, forward and backward with the fused optimizer.
        gemm: matrix products and attention, forward and backward.
        all_to_all: input dist and output dist of embeddings, row-wise tables' reduce-scatter
            included: the time that the step waits for them, and their own copies.
        all_reduce: of dense gradients, likewise, with what else DistributedDataParallel sends.
        other: everything else, reading batches and the dense optimizer included.
    """

    lookup: float
    gemm: float
    all_to_all: float
    all_reduce: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.as_dict().values())

    def __sub__(self, other: StageTimes) -> Self:
        """What is longer than in another step, by stage."""
        return type(self)(**{s: getattr(self, s) - getattr(other, s) for s in STAGES})

    def as_dict(self) -> dict[Stage, float]:
        """Seconds by stage."""
        return asdict(self)  # type: ignore[return-value]

    def scaled(self, total: float) -> Self:
        """The same shares of another step time."""
        factor = total / self.total if self.total else 0.0
        return type(self)(**{stage: value * factor for stage, value in self.as_dict().items()})

    @classmethod
    def mean(cls, times: Sequence[Self]) -> Self:
        """The mean of several ranks or steps."""
        return cls(**{s: sum(getattr(each, s) for each in times) / len(times) for s in STAGES})


# Names of operators, of autograd's nodes and of TorchRec's annotated regions (1.6 to 1.9), on the
# training thread; then of kernels on a device. The first that matches counts.
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
    """The stage of an operator, a region or a kernel by its name.

    None for those that can be part of any stage, such as a copy: they belong to what they are
    within, and to ``other`` within nothing.
    """
    return next((stage for stage, pattern in _PATTERNS if pattern.search(name)), None)


#: What a collective does with what ranks send.
CollectiveKind = Literal[
    "all_to_all", "reduce_scatter", "all_gather", "all_reduce", "broadcast", "other"
]
#: A process group by its name, and one kind of its collectives.
Channel = tuple[str, CollectiveKind]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def is_group(name: object) -> bool:
    """Whether a process group of this process has that name."""
    try:
        resolve_group(name)
    except (RuntimeError, TypeError):
        return False
    return True


def resolve_group(name: object) -> Any:
    """The process group of that name; raises RuntimeError or TypeError where there is none."""
    from torch.distributed import distributed_c10d

    # Private, but how torch's functional collectives themselves find it (2.11 to 2.14).
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)

"""The stages of a training step, and which operation belongs to which (RecD, figure 8)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal, Self

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

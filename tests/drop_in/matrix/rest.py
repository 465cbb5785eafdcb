"""What else a trainer may have, one thing at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.distributed.types import ShardingType

#: What TorchRec's numbers may differ by where unique rows are rounded as such.
_NEAR = {"FP16": 1e-3, "BF16": 1e-2}
#: Those that train: quantised ones are for inference.
KERNELS = [kind for kind in EmbeddingComputeKernel if "quant" not in kind.value]


@dataclass(frozen=True)
class Rest:
    """What a trainer has besides.

    Attributes:
        ddp: arguments of DistributedModelParallel's wrapper for data-parallel parts.
        compiled: ``dense``, the dense part, or ``all``, by torch.compile.
        autocast: whether forward passes are in bfloat16.
        accumulate: steps whose gradients of dense parameters are added up; ``by`` whom.
        mode: of the evaluation.
        two_d: whether DMPCollection takes DistributedModelParallel's place.
        codecs: precision of quantised collectives.
        loss_scale: of their backward pass.
        constrained: the sharding types that the trainer's constraints name, table by table.
        kernel: the compute kernel that they name.
        planner: whether the trainer plans by TorchRec's planner.
        own_plan: whether the plan is the trainer's own.
        state: whose state dict goes into whose model after the first steps.
        metrics: whether a RecMetricModule sees predictions.
        sync: whether TorchRec's synchronous collectives are on.
        truth: whether one process without sharding computes the same.
        near: what TorchRec's numbers may differ by; unique rows are rounded as such.
    """

    ddp: Mapping[str, Any] | None = None
    compiled: str = ""
    autocast: bool = False
    accumulate: int = 1
    mode: str = "no_grad"
    two_d: bool = False
    codecs: str = ""
    loss_scale: float | None = None
    constrained: tuple[str, ...] = ()
    kernel: str = ""
    planner: bool = False
    own_plan: bool = False
    state: str = ""
    metrics: bool = False
    sync: bool = False
    truth: bool = True
    near: float = 1e-6


NOTHING = "nothing"
REST: dict[str, Rest] = {
    NOTHING: Rest(),
    "DDP, find_unused_parameters": Rest(ddp={"find_unused_parameters": True}),
    "DDP, static_graph": Rest(ddp={"static_graph": True}),
    "DDP, small buckets": Rest(ddp={"bucket_cap_mb": 1}),
    "DDP, FP16 all-reduce": Rest(ddp={"allreduce_comm_precision": "fp16"}, truth=False),
    "torch.compile of the dense part": Rest(compiled="dense"),
    "torch.compile of all": Rest(compiled="all"),
    "autocast": Rest(autocast=True, truth=False),
    "gradient accumulation": Rest(accumulate=3, truth=False),
    "evaluation in inference mode": Rest(mode="inference_mode"),
    "DMPCollection": Rest(two_d=True, truth=False),
    **{
        f"qcomms {kind.name}": Rest(codecs=kind.name, truth=False, near=_NEAR.get(kind.name, 1e-6))
        for kind in CommType
    },
    "qcomms FP16, scaled losses": Rest(codecs="FP16", loss_scale=8.0, truth=False, near=1e-3),
    **{f"constraints: {kind.value}": Rest(constrained=(kind.value,)) for kind in ShardingType},
    "constraints: table_wise and row_wise": Rest(constrained=("table_wise", "row_wise")),
    **{f"constraints: kernel {kind.value}": Rest(kernel=kind.value) for kind in KERNELS},
    "TorchRec's planner": Rest(planner=True),
    "a plan of the trainer's own": Rest(own_plan=True),
    "stock state dict into ours": Rest(state="stock to ours"),
    "our state dict into stock": Rest(state="ours to stock"),
    "unsharded state dict into ours": Rest(state="whole to ours"),
    "our state dict into unsharded": Rest(state="ours to whole"),
    "RecMetricModule": Rest(metrics=True),
    "synchronous collectives": Rest(sync=True),
}

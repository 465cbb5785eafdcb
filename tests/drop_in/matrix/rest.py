"""What else a trainer may have, one thing at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.types import ShardingType


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
        constrained: the sharding type that the trainer's constraints name for all tables.
        planner: whether the trainer plans by TorchRec's planner.
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
    constrained: str = ""
    planner: bool = False
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
    "qcomms FP16": Rest(codecs="FP16", truth=False, near=1e-3),
    "qcomms BF16": Rest(codecs="BF16", truth=False, near=1e-2),
    **{f"constraints: {kind.value}": Rest(constrained=kind.value) for kind in ShardingType},
    "TorchRec's planner": Rest(planner=True),
    "stock state dict into ours": Rest(state="stock to ours"),
    "our state dict into stock": Rest(state="ours to stock"),
    "unsharded state dict into ours": Rest(state="whole to ours"),
    "our state dict into unsharded": Rest(state="ours to whole"),
    "RecMetricModule": Rest(metrics=True),
    "synchronous collectives": Rest(sync=True),
}

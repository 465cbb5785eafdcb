"""Optimizers of tables, training loops and other properties of trainers, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torchrec.distributed import train_pipeline
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist, train_pipelines
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugins.testing.device import DEVICE

LR = 0.1


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of a trainer's tables.

    ``reference`` is the same in one process; without one, training must differ from ``unlike``.
    """

    in_backward: type[Optimizer] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    of_table: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    class_of_table: Mapping[str, type[Optimizer] | None] = field(default_factory=dict)
    fused_params: Mapping[str, Any] = field(default_factory=dict)
    dense: type[Optimizer] | None = None
    around: str = ""
    reference: Callable[..., Optimizer] | None = None
    unlike: TableOptimizer | None = None

    def bring(self, model: nn.Module) -> None:
        if self.in_backward is None:
            return
        from torch.distributed.optim import _apply_optimizer_in_backward

        for name, parameter in model.named_parameters():
            table = table_of(name)
            kind = self.class_of_table.get(table, self.in_backward)
            if table and kind is not None:
                arguments = {**self.arguments, **self.of_table.get(table, {})}
                _apply_optimizer_in_backward(kind, [parameter], arguments)

    def is_dense(self, table: str) -> bool:
        return self.dense is not None and self.class_of_table.get(table, self.in_backward) is None

    def of_whole(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        if self.reference is None:
            return None
        groups = [
            {"params": [parameter], **self.of_table.get(table_of(name), {})}
            for name, parameter in parameters
        ]
        return self.reference(groups, **self.arguments)


def table_of(name: str) -> str:
    """Return the table of a parameter, empty for another parameter."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and parts[-2].startswith("t_") else ""


def _in_backward(kind: type[Optimizer], **arguments: Any) -> TableOptimizer:
    return TableOptimizer(kind, {"lr": LR, **arguments}, reference=kind)


def _fused(kind: EmbOptimType, reference: Callable[..., Optimizer]) -> TableOptimizer:
    params = {"learning_rate": LR, "optimizer": kind}
    return TableOptimizer(fused_params=params, arguments={"lr": LR}, reference=reference)


def _each(*kinds: type[Optimizer]) -> Callable[..., Any]:
    def build(groups: list[dict[str, Any]], **arguments: Any) -> CombinedOptimizer:
        return CombinedOptimizer(
            [
                KeyedOptimizerWrapper(
                    {"weight": group["params"][0]}, lambda p, kind=kind: kind(p, **arguments)
                )
                for kind, group in zip(kinds, groups, strict=True)
            ]
        )

    return build


_RULES: dict[EmbOptimType, type[Optimizer]] = {
    EmbOptimType.EXACT_SGD: SGD,
    EmbOptimType.EXACT_ADAGRAD: Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: Adam,
}
#: Arguments other than the default, by class. FBGEMM's kernels ignore some without an error.
_ARGUMENTS: dict[type[Optimizer], dict[str, Any]] = {
    SGD: {"momentum": 0.5, "weight_decay": 0.1, "maximize": True},
    Adagrad: {"lr_decay": 0.5, "initial_accumulator_value": 0.5},
    RowWiseAdagrad: {"eps": 0.5, "weight_decay": 0.1, "lr_decay": 0.5},
}
#: FBGEMM's own arguments, which change the gradients of rows.
_OF_FBGEMM: dict[str, dict[str, Any]] = {
    "max_norm": {"max_norm": 0.01},
    "gradient_clipping": {"gradient_clipping": True, "max_gradient": 1e-3},
    "weight_decay, decoupled": {
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
    },
    "momentum": {"momentum": 0.5},
}
_ROW_WISE = _in_backward(RowWiseAdagrad)
OPTIMIZERS: dict[str, TableOptimizer] = {
    **{f"{kind.__name__} in backward": _in_backward(kind) for kind in _RULES.values()},
    **{f"{rule.name} by fused_params": _fused(rule, kind) for rule, kind in _RULES.items()},
    **{
        f"{kind.__name__} {name}": _in_backward(kind, **{name: value})
        for kind, arguments in _ARGUMENTS.items()
        for name, value in arguments.items()
    },
    **{
        f"{rule.name} fused_params {name}": TableOptimizer(
            fused_params={**_fused(rule, SGD).fused_params, **arguments}, unlike=_fused(rule, SGD)
        )
        for rule in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
        for name, arguments in _OF_FBGEMM.items()
    },
    "RowWiseAdagrad max_norm in backward": TableOptimizer(
        RowWiseAdagrad, {"lr": LR, "max_norm": 0.01}, unlike=_ROW_WISE
    ),
    "a class that FBGEMM lacks": TableOptimizer(torch.optim.RMSprop, {"lr": LR}),
    "an argument that FBGEMM lacks": TableOptimizer(RowWiseAdagrad, {"lr": LR, "lrr": 1}),
    "a fused parameter that FBGEMM lacks": TableOptimizer(fused_params={"lrr": 1}),
    "FBGEMM's default": TableOptimizer(arguments={"lr": 0.01}, reference=SGD),
    "in backward before fused_params": TableOptimizer(
        SGD,
        {"lr": LR},
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.9},
        reference=SGD,
    ),
    **{
        f"other {name} of a table": TableOptimizer(
            RowWiseAdagrad, {"lr": LR}, {"t_b": {name: value}}, reference=RowWiseAdagrad
        )
        for name, value in (("lr", 0.3), ("eps", 0.5))
    },
    "other class of a table": TableOptimizer(
        RowWiseAdagrad,
        {"lr": LR},
        class_of_table={"t_b": SGD},
        reference=_each(RowWiseAdagrad, SGD),
    ),
    "in backward of a table, dense of the other": TableOptimizer(
        RowWiseAdagrad,
        {"lr": LR},
        class_of_table={"t_b": None},
        dense=SGD,
        reference=_each(RowWiseAdagrad, SGD),
    ),
    **{
        f"dense {kind.__name__}, data-parallel": TableOptimizer(
            arguments={"lr": LR}, dense=kind, reference=kind
        )
        for kind in (SGD, RowWiseAdagrad, Adam)
    },
    **{
        f"RowWiseAdagrad with {around}": TableOptimizer(
            RowWiseAdagrad, {"lr": LR}, around=around, unlike=_ROW_WISE
        )
        for around in ("warm-up", "clipping by norm", "clipping by value", "a torch lr_scheduler")
    },
}


@dataclass(frozen=True)
class Loop:
    """A training loop; ``build`` makes a pipeline of model and optimizer, None for a plain loop."""

    build: Callable[[nn.Module, Optimizer], Any] | None = None
    trains: bool = True
    truth: bool = True  # trains as a plain loop does


def _of(kind: Any, **arguments: Any) -> Callable[[nn.Module, Optimizer], Any]:
    return lambda model, optimizer: kind(model, optimizer, DEVICE, **arguments)


def _own_forward(model: nn.Module, optimizer: Optimizer) -> Any:
    return TrainPipelineSparseDist(model, optimizer, DEVICE, custom_model_fwd=lambda b: model(b))


PIPELINES: dict[str, Loop] = {
    "a plain loop": Loop(),
    "TrainPipelineBase": Loop(_of(train_pipelines.TrainPipelineBase)),
    "TrainPipelineSparseDist": Loop(_of(TrainPipelineSparseDist)),
    "TrainPipelineSparseDistLite": Loop(_of(train_pipelines.TrainPipelineSparseDistLite)),
    "EvalPipelineSparseDist": Loop(_of(train_pipeline.EvalPipelineSparseDist), trains=False),
    # Without it, the batches left in the pipeline at the end of the loader are not trained.
    "TrainPipelineSparseDist execute_all_batches": Loop(
        _of(TrainPipelineSparseDist, execute_all_batches=False), truth=False
    ),
    **{
        f"TrainPipelineSparseDist {name}": Loop(_of(TrainPipelineSparseDist, **{name: True}))
        for name in (
            *("apply_jit", "pipeline_postproc", "enqueue_batch_after_forward"),
            *("enable_inplace_copy_batch", "free_features_storage_early"),
            "clear_data_dist_inputs",
        )
    },
    "TrainPipelineSparseDist custom_model_fwd": Loop(_own_forward),
}


@dataclass(frozen=True)
class Rest:
    find_unused: bool = False  # of the data-parallel wrapper
    compiled: str = ""  # "dense" or "all"
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
    state: str = ""  # whose state dict goes into whose model after the first steps
    sync: bool = False
    truth: bool = True  # one process without sharding computes the same
    near: float = 1e-6  # largest difference from TorchRec; codecs round sums of unique rows


_WHOLE_ROWS = ("table_wise", "row_wise", "table_row_wise")
REST: dict[str, Rest] = {
    "nothing": Rest(),
    "DDP, find_unused_parameters": Rest(find_unused=True),
    "torch.compile of the dense part": Rest(compiled="dense"),
    "torch.compile of all": Rest(compiled="all"),
    "autocast": Rest(autocast=True, truth=False),
    "gradient accumulation": Rest(accumulate=3, truth=False),
    "evaluation in inference mode": Rest(mode="inference_mode"),
    "DMPCollection": Rest(two_d=True, truth=False),
    "qcomms FP16": Rest(codecs="FP16", truth=False, near=1e-3),
    "qcomms BF16": Rest(codecs="BF16", truth=False, near=1e-2),
    "qcomms FP16, scaled losses": Rest(codecs="FP16", loss_scale=8.0, truth=False, near=1e-3),
    # Column shards have sums of their part of a row; data-parallel tables have the dense optimizer.
    **{
        f"constraints: {kind.value}": Rest(
            constrained=(kind.value,), truth=kind.value in _WHOLE_ROWS
        )
        for kind in ShardingType
    },
    "constraints: table_wise and row_wise": Rest(constrained=("table_wise", "row_wise")),
    "constraints: kernel dense": Rest(kernel="dense"),
    "TorchRec's planner": Rest(planner=True, truth=False),  # it may choose data-parallel tables
    "a plan of the trainer's own": Rest(own_plan=True),
    "stock state dict into ours": Rest(state="stock to ours"),
    "our state dict into stock": Rest(state="ours to stock"),
    "unsharded state dict into ours": Rest(state="whole to ours"),
    "our state dict into unsharded": Rest(state="ours to whole"),
    "synchronous collectives": Rest(sync=True),
}

"""Optimizers of tables, and other properties of trainers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed import utils
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

LR = 0.1

#: The classes that TorchRec maps to FBGEMM's kernels (private, torchrec 1.8).
CLASSES: tuple[type[Optimizer], ...] = tuple(utils._OPTIMIZER_CLASS_TO_EMB_OPT_TYPE)

_REFERENCES: dict[EmbOptimType, Callable[..., Optimizer]] = {
    EmbOptimType.SGD: torch.optim.SGD,
    EmbOptimType.EXACT_SGD: torch.optim.SGD,
    EmbOptimType.EXACT_ADAGRAD: torch.optim.Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: torch.optim.Adam,
}


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
        kind = self.class_of_table.get(table, self.in_backward)
        return self.dense is not None and kind is None

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


def in_backward(kind: type[Optimizer], **arguments: Any) -> TableOptimizer:
    reference = _REFERENCES.get(utils._OPTIMIZER_CLASS_TO_EMB_OPT_TYPE[kind])
    return TableOptimizer(
        kind, arguments, reference=kind if kind.__module__.startswith("torch.") else reference
    )


def _fused(kind: EmbOptimType | None, **arguments: Any) -> TableOptimizer:
    params = {"learning_rate": LR, **arguments}
    if kind is not None:
        params["optimizer"] = kind
    reference = _REFERENCES.get(kind or EmbOptimType.EXACT_SGD)
    said = {"lr": params.pop("learning_rate"), **{k: v for k, v in arguments.items() if k == "eps"}}
    return TableOptimizer(
        fused_params={"learning_rate": said["lr"], **params}, arguments=said, reference=reference
    )


def _name(kind: type) -> str:
    return f"{kind.__module__.split('.')[0]}.optim.{kind.__name__}"


#: Values other than the default, of arguments by name.
_VALUES: dict[str, Any] = {
    "momentum": 0.5,
    "dampening": 0.1,
    "weight_decay": 0.1,
    "maximize": True,
    "lr_decay": 0.5,
    "initial_accumulator_value": 0.5,
    "eps": 0.5,
    "foreach": False,
    "fused": False,
    "differentiable": True,
}
#: Those that change nothing but how it is computed, or only together with others.
SAME_RESULT = {"params", "lr", "nesterov", "unused", "kwargs", "capturable"}
#: Arguments that FBGEMM's kernels take and a class of torch or TorchRec does not.
_OF_FBGEMM: dict[str, dict[str, Any]] = {
    "max_norm": {"max_norm": 0.01},
    "gradient_clipping": {"gradient_clipping": True, "max_gradient": 1e-3},
    "weight_decay, decoupled": {
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
    },
    "weight_decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.5},
    "eps": {"eps": 0.5},
}
#: Arguments that a rule has no use for.
_MEANINGLESS = {
    (EmbOptimType.EXACT_SGD, "eps"),
    (EmbOptimType.EXACT_ROWWISE_ADAGRAD, "momentum"),
}
_RUN_ON_CPU = (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)


def arguments_of(kind: type[Optimizer]) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in SAME_RESULT]


def _all() -> dict[str, TableOptimizer]:
    found = {f"{_name(kind)} in backward": in_backward(kind, lr=LR) for kind in CLASSES}
    found |= {
        f"{kind.name} by fused_params": _fused(kind)
        for kind in EmbOptimType
        if kind != EmbOptimType.NONE
    }
    found["NONE by fused_params"] = TableOptimizer(fused_params={"optimizer": EmbOptimType.NONE})
    for kind in _RUN_ON_CPU:
        found[f"{_name(kind)} without lr"] = in_backward(kind)
        for name in arguments_of(kind):
            found[f"{_name(kind)} {name}"] = in_backward(kind, lr=LR, **{name: _VALUES[name]})
    for rule in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        for name, arguments in _OF_FBGEMM.items():
            if (rule, name) not in _MEANINGLESS:
                found[f"{rule.name} fused_params {name}"] = _of_fbgemm(rule, name, arguments)
    found["RowWiseAdagrad max_norm in backward"] = TableOptimizer(
        RowWiseAdagrad, {"lr": LR, "max_norm": 0.01}, unlike=in_backward(RowWiseAdagrad, lr=LR)
    )
    found["a class that FBGEMM lacks"] = TableOptimizer(torch.optim.RMSprop, {"lr": LR})
    found["an argument that FBGEMM lacks"] = TableOptimizer(RowWiseAdagrad, {"lr": LR, "lrr": 1})
    found["a fused parameter that FBGEMM lacks"] = TableOptimizer(fused_params={"lrr": 1})
    found["no optimizer said"] = TableOptimizer(
        arguments={"lr": 0.01}, reference=torch.optim.SGD
    )  # FBGEMM's default
    found["in backward before fused_params"] = TableOptimizer(
        torch.optim.SGD,
        {"lr": LR},
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.9},
        reference=torch.optim.SGD,
    )
    found |= _by_table()
    for kind in (*_RUN_ON_CPU, torch.optim.Adam, torch.optim.AdamW):
        found[f"dense {_name(kind)}, data-parallel"] = TableOptimizer(
            arguments={"lr": LR}, dense=kind, reference=kind
        )
    found["dense torch.optim.SGD weight_decay, data-parallel"] = TableOptimizer(
        arguments={"lr": LR, "weight_decay": 0.1}, dense=torch.optim.SGD, reference=torch.optim.SGD
    )
    for around in ("warm-up", "clipping by norm", "clipping by value", "a torch lr_scheduler"):
        found[f"RowWiseAdagrad with {around}"] = TableOptimizer(
            RowWiseAdagrad, {"lr": LR}, around=around, unlike=in_backward(RowWiseAdagrad, lr=LR)
        )
    return found


def _by_table() -> dict[str, TableOptimizer]:
    found = {
        f"other {name} of a table": TableOptimizer(
            RowWiseAdagrad, {"lr": LR}, {"t_b": {name: value}}, reference=RowWiseAdagrad
        )
        for name, value in (("lr", 0.3), ("eps", 0.5), ("weight_decay", 0.1))
    }
    found["other class of a table"] = TableOptimizer(
        RowWiseAdagrad,
        {"lr": LR},
        class_of_table={"t_b": torch.optim.SGD},
        reference=_each(RowWiseAdagrad, torch.optim.SGD),
    )
    found["in backward of a table, dense of the other"] = TableOptimizer(
        RowWiseAdagrad,
        {"lr": LR},
        class_of_table={"t_b": None},
        dense=torch.optim.SGD,
        reference=_each(RowWiseAdagrad, torch.optim.SGD),
    )
    return found


def _each(*kinds: type[Optimizer]) -> Callable[..., Any]:
    """Return an optimizer with another class for each table."""

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


def _of_fbgemm(kind: EmbOptimType, name: str, arguments: Mapping[str, Any]) -> TableOptimizer:
    made = _fused(kind, **arguments)
    if name in ("weight_decay", "momentum", "eps"):
        return replace(made, arguments={**made.arguments, **arguments})
    return replace(made, reference=None, unlike=_fused(kind))


OPTIMIZERS: dict[str, TableOptimizer] = _all()


#: What TorchRec's numbers may differ by where unique rows are rounded as such.
_NEAR = {"FP16": 1e-3, "BF16": 1e-2}
#: Those that train: quantised ones are for inference.
KERNELS = [kind for kind in EmbeddingComputeKernel if "quant" not in kind.value]


@dataclass(frozen=True)
class Rest:
    ddp: Mapping[str, Any] | None = None  # of the data-parallel wrapper
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
    near: float = 1e-6  # largest difference from TorchRec; unique rows are rounded as such


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
    "synchronous collectives": Rest(sync=True),
}

"""The state of model and optimizer in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import OptimizerWrapper

from recd_plugins.compat.lookup_kernels import set_steps_of_tables, steps_of_tables
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.rank_agreement import together
from recd_plugins.runtime.text import shortened
from recd_plugins.training.optimizer import in_embedding_module

# Module names: models keep replicated pooled tables in a separate module with this prefix.
_REPLICATED = re.compile(r"(^|\.)replicated_(\w+\.embedding_bags\.)")


@dataclass(frozen=True)
class CheckpointState:
    """State of model and optimizer, with names and shapes independent of the sharding plan.

    Data-parallel tables have the same names as sharded ones, and their row-wise Adagrad state is
    stored as FBGEMM's ``momentum1``, ``[rows]``. Step counts of optimizers such as Adam are stored
    under ``steps``.
    """

    document: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    tables: frozenset[str]

    @classmethod
    def of(cls, dmp: DistributedModelParallel, optimizer: Optimizer | None) -> CheckpointState:
        """Return the state of the model and, if given, the optimizer. All ranks must call this."""
        model = dmp.state_dict()
        document: dict[str, Any] = {"model": {}}
        for name, value in model.items():
            if (common := common_name(name)) in document["model"]:
                raise SetupError(
                    f"two parameters of the model are named {common!r} in checkpoints, which "
                    "remove the prefix 'replicated_'. Rename a table or a module."
                )
            document["model"][common] = value
        if optimizer is None:
            return cls(document, model, {}, frozenset())
        state = optimizer.state_dict()
        tables = frozenset(
            name
            for name, values in state["state"].items()
            if values.keys() == {"step", "sum"} and in_embedding_module(dmp, name)
        )
        by_name = {
            common_name(name): {f"{name.split('.')[-2]}.momentum1": values["sum"].view(-1)}
            if name in tables
            else values
            for name, values in state["state"].items()
            if values  # SGD has no state, for replicated tables too
        }
        document["optimizer"] = {**state, "state": by_name}
        if steps := steps_of_tables(dmp.module):
            document["steps"] = steps
        return cls(document, model, state, tables)

    def leave_out_steps(self, stored: Collection[str]) -> None:
        """Remove step counts of optimizers that are not in ``stored``, the checkpoint's names."""
        steps = self.document.pop("steps", {})
        if kept := {name: step for name, step in steps.items() if f"steps.{name}" in stored}:
            self.document["steps"] = kept

    def put_back(
        self, dmp: DistributedModelParallel, optimizer: Optimizer | None, step: int
    ) -> None:
        """Load the state that DCP read into model and optimizer. All ranks must call this.

        ``step``, the checkpoint's step, is also the step count of optimizers without a saved one.
        """
        filled = self.document["model"]
        dmp.load_state_dict({name: filled[common_name(name)] for name in self.model})
        if optimizer is None:
            return
        set_steps_of_tables(dmp.module, self.document.get("steps", {}), otherwise=step)
        filled = self.document["optimizer"]
        by_name = {
            name: {"step": torch.full_like(values["step"], step), "sum": values["sum"]}
            if name in self.tables
            else filled["state"].get(common_name(name), {})
            for name, values in self.optimizer["state"].items()
        }
        optimizer.load_state_dict({**filled, "state": by_name})


def common_name(name: str) -> str:
    """Return a parameter's name in checkpoints, equal for data-parallel and sharded tables."""
    return _REPLICATED.sub(r"\1\2", name)


def check_optimizer(dmp: DistributedModelParallel, optimizer: Optimizer) -> None:
    """Raise SetupError if checkpoints would lack optimizer state. All ranks must call this."""
    if not hasattr(optimizer, "params"):
        raise SetupError(
            f"{type(optimizer).__name__} has no parameter names, which checkpoints need. Wrap the "
            "optimizer in KeyedOptimizerWrapper of torchrec.optim.keyed."
        )
    saved: Any = optimizer
    while isinstance(saved, OptimizerWrapper):
        saved = saved._optimizer  # private, torchrec 1.6 to 1.9; its state dict is the wrapper's
    state = optimizer.state
    if unsaved := [n for n, p in optimizer.params.items() if p in state and p not in saved.state]:
        raise SetupError(
            f"the optimizer's state_dict() lacks the state of {shortened(unsaved)}, so a resumed "
            "run would lose this state. Put wrappers, such as WarmupOptimizer, inside "
            "CombinedOptimizer([...]): one per optimizer, each with its own param_name."
        )
    known = {id(parameter) for parameter in optimizer.params.values()}
    fused = dmp.fused_optimizer
    lacking = {name: each for name, each in fused.params.items() if id(each) not in known}
    if not any(together(lambda: bool(lacking))):
        return
    state = fused.state  # collective
    lost = together(lambda: [name for name, each in lacking.items() if state.get(each)])
    if names := sorted({name for of_rank in lost for name in of_rank}):
        raise SetupError(
            f"the optimizer lacks the fused optimizer state of {shortened(names)}. Use "
            "CombinedOptimizer([dmp.fused_optimizer, your_optimizer]) of torchrec.optim.keyed."
        )


def make_state(optimizer: Optimizer, stored: Collection[str]) -> None:
    """Create the lazy state of an optimizer, so that a checkpoint can be loaded into it.

    Adam and SGD with momentum create their state in the first step. This function therefore runs a
    step with zero gradients, and then restores the parameters. It includes only parameters whose
    state is in the checkpoint, according to its names ``stored``.
    """
    named: dict[str, Any] = getattr(optimizer, "params", {})
    dense = {name: each for name, each in named.items() if isinstance(each, nn.Parameter)}
    known = optimizer.state
    lazy = {
        parameter: parameter.detach().clone()
        for name, parameter in dense.items()
        if parameter not in known
        and any(entry.startswith(f"optimizer.state.{common_name(name)}.") for entry in stored)
    }
    if not lazy:
        return
    gradients = [(parameter, parameter.grad) for parameter in dense.values()]
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter in lazy else None
    optimizer.step()
    with torch.no_grad():
        for parameter, values in lazy.items():
            parameter.copy_(values)  # weight decay changes them
    for parameter, gradient in gradients:
        parameter.grad = gradient

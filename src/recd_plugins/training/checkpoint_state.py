"""State of model and optimizer, under names and shapes that do not depend on the plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

from recd_plugins.compat.lookup_kernels import set_steps_of_tables, steps_of_tables
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.rank_agreement import together
from recd_plugins.runtime.text import shortened
from recd_plugins.training.optimizer import in_embedding_module

# Models keep replicated pooled tables in such a module, and the others in the one without the word.
_REPLICATED = re.compile(r"(^|\.)replicated_(\w+\.embedding_bags\.)")


@dataclass(frozen=True)
class CheckpointState:
    """State of a model and its optimizer.

    A replicated table is named as a sharded one, and so is its row-wise Adagrad: TorchRec's
    ``sum``, ``[rows, 1]``, holds the numbers of FBGEMM's ``momentum1``, ``[rows]``. Its ``step``
    changes nothing without a decay of the learning rate, and is left out. Tables that learn by
    their step count, as FBGEMM's Adam does, have it under ``steps``.
    """

    document: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    tables: frozenset[str]

    @classmethod
    def of(cls, dmp: DistributedModelParallel, optimizer: Optimizer | None) -> CheckpointState:
        """Return the present state; of the model alone without an optimizer. Collective."""
        model = dmp.state_dict()
        check_names(model)
        document: dict[str, Any] = {
            "model": {common_name(name): value for name, value in model.items()}
        }
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
            if values  # SGD has none, also of a replicated table
        }
        document["optimizer"] = {**state, "state": by_name}
        if steps := steps_of_tables(dmp.module):
            document["steps"] = steps
        return cls(document, model, state, tables)

    def leave_out_steps(self, stored: Collection[str]) -> list[str]:
        """Leave out and return tables whose steps an older checkpoint lacks."""
        steps = self.document.pop("steps", {})
        kept = {name: step for name, step in steps.items() if f"steps.{name}" in stored}
        if kept:
            self.document["steps"] = kept
        return [name for name in steps if name not in kept]

    def put_back(
        self, dmp: DistributedModelParallel, optimizer: Optimizer | None, step: int
    ) -> None:
        """Load what DCP filled the document with. Collective."""
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
    """Return the name of a parameter in checkpoints."""
    return _REPLICATED.sub(r"\1\2", name)


def check_names(names: Iterable[str]) -> None:
    """Refuse parameters that would share a name in checkpoints and overwrite each other."""
    by_common: dict[str, str] = {}
    for name in names:
        first = by_common.setdefault(common_name(name), name)
        if first != name:
            raise SetupError(
                f"{first} and {name} of the model have one name in checkpoints, where replicated "
                "tables are named as sharded ones, without replicated_: give one of the tables, or "
                "one of their modules, another name"
            )


def check_optimizer(dmp: DistributedModelParallel, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state would be missing from checkpoints. Collective."""
    if not hasattr(optimizer, "params"):
        raise SetupError(
            f"checkpoints have state by the names of parameters, which {type(optimizer).__name__} "
            "does not know: put it into a KeyedOptimizerWrapper of torchrec.optim.keyed"
        )
    if unsaved := _unsaved(optimizer):
        raise SetupError(
            f"no state dict of the optimizer has the state of {shortened(unsaved)}, which training "
            "would begin anew from a checkpoint: put wrappers, as WarmupOptimizer, inside of "
            "CombinedOptimizer([...]), one around dmp.fused_optimizer and one around each of "
            "yours, with a param_name of its own"
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
            f"the optimizer lacks the state that {shortened(names)} learn by in the backward pass, "
            "which checkpoints are to have: give CombinedOptimizer([dmp.fused_optimizer, yours]) "
            "of torchrec.optim.keyed"
        )


def make_state(optimizer: Optimizer, stored: Collection[str]) -> None:
    """Have an optimizer make its lazy state, to be filled from a checkpoint.

    Adam makes its state in the first step, and so does SGD with momentum. This takes a step by
    gradients of zero, for those parameters alone, and restores them.
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


def trained_names(optimizer: Optimizer | None) -> list[str]:
    """Return the parameters of an optimizer, as checkpoints name them."""
    return [common_name(name) for name in getattr(optimizer, "params", {})]


def _unsaved(optimizer: Any) -> list[str]:
    """Return parameters with state in some part of an optimizer, and none in its state dict.

    A wrapper, as WarmupOptimizer, adds state of its own, and keeps the state that a
    CombinedOptimizer inside had when it was made.
    """
    saved = optimizer
    while isinstance(saved, OptimizerWrapper):
        saved = saved._optimizer  # private, torchrec 1.6 to 1.9; its state dict is the wrapper's
    kept = saved.state
    found = {
        name: None
        for part in _parts(optimizer)
        for name, each in part.params.items()
        if each in part.state and each not in kept
    }
    return list(found)


def _parts(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    if isinstance(optimizer, OptimizerWrapper):
        yield from _parts(optimizer._optimizer)
    elif isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _parts(part)

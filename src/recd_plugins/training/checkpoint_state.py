"""State of model and optimizer under the names and shapes that it has wherever tables live."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

from recd_plugins.distributed.step_counts import set_steps_of_tables, steps_of_tables
from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import SetupError
from recd_plugins.training.agreement import together
from recd_plugins.training.optimizer import in_embedding_module
from recd_plugins.words import shortened

# Where models keep pooled tables that every rank has whole; the others are in what is called so
# without the first word.
_REPLICATED = re.compile(r"(^|\.)replicated_(\w+\.embedding_bags\.)")


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint holds of a model and its optimizer.

    A replicated table is named as a sharded one, and so is its row-wise Adagrad: ``sum`` of
    TorchRec's, [rows, 1], are the numbers of ``momentum1`` of FBGEMM's, [rows]. Its ``step``
    changes nothing without a decay of the learning rate, and is left out.

    Tables that learn by the number of their steps, as FBGEMM's Adam does, have that under
    ``steps``: TorchRec's state dicts lack it.

    Attributes:
        document: for DCP, which saves its tensors or fills them in place.
        model, optimizer: the state dicts that it was made of; tensors are shared.
        tables: names in ``optimizer`` of replicated tables with row-wise Adagrad.
    """

    document: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    tables: frozenset[str]

    @classmethod
    def of(cls, dmp: DistributedModelParallel, optimizer: Optimizer | None) -> CheckpointState:
        """The state as it is now; without an optimizer, of the model alone. A collective call.

        Raises:
            SetupError: two parameters would have one name.
        """
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
            # What has no state is no entry: of SGD, a replicated table has none either.
            if values
        }
        document["optimizer"] = {**state, "state": by_name}
        if steps := steps_of_tables(dmp.module):
            document["steps"] = steps
        return cls(document, model, state, tables)

    def leave_out_steps(self, stored: Collection[str]) -> list[str]:
        """Leave out the steps of tables that an older checkpoint lacks, and name these.

        Args:
            stored: names of the entries of the checkpoint.
        """
        steps = self.document.pop("steps", {})
        kept = {name: step for name, step in steps.items() if f"steps.{name}" in stored}
        if kept:
            self.document["steps"] = kept
        return [name for name in steps if name not in kept]

    def put_back(
        self, dmp: DistributedModelParallel, optimizer: Optimizer | None, step: int
    ) -> None:
        """Load what DCP filled the document with. A collective call.

        Args:
            dmp, optimizer: those that the state is of.
            step: optimizer steps done.
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

    def num_bytes(self) -> int:
        """Bytes of the tensors of this rank."""
        return sum(
            tensor.numel() * tensor.element_size()
            for value in _values(self.document)
            for tensor in _local(value)
        )


def common_name(name: str) -> str:
    """The name of a parameter in checkpoints."""
    return _REPLICATED.sub(r"\1\2", name)


def check_names(names: Iterable[str]) -> None:
    """Refuse parameters that would have one name in checkpoints, where the last would be all.

    Args:
        names: of the parameters of a model.

    Raises:
        SetupError: names two.
    """
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
    """Refuse an optimizer without what tables have learned by in the backward pass.

    A checkpoint would have none of it, and who goes on from that would begin anew, unseen. A
    collective call.

    Raises:
        SetupError: names the tables; or the optimizer knows no names of parameters, or has state
            that its state dicts lack.
    """
    given: Mapping[str, Any] | None = getattr(optimizer, "params", None)
    if given is None:
        raise SetupError(
            f"checkpoints have state by the names of parameters, which {type(optimizer).__name__} "
            "does not know: put it into a KeyedOptimizerWrapper of torchrec.optim.keyed"
        )
    if unsaved := _unsaved(optimizer):
        state_of, wrapper = shortened([*unsaved]), next(iter(unsaved.values()))
        raise SetupError(
            f"no state dict of the optimizer has the state of {state_of}, which training would "
            f"begin anew from a checkpoint: put the {wrapper} inside of "
            "CombinedOptimizer([...]), one around dmp.fused_optimizer and one around each of "
            "yours, with a param_name of its own"
        )
    known = {id(parameter) for parameter in given.values()}
    fused = dmp.fused_optimizer
    lacking = {name: each for name, each in fused.params.items() if id(each) not in known}
    if not any(together(lambda: bool(lacking))):
        return
    state = fused.state  # which ranks may read together alone
    lost = together(lambda: [name for name, each in lacking.items() if state.get(each)])
    if names := sorted({name for of_rank in lost for name in of_rank}):
        raise SetupError(
            f"the optimizer lacks the state that {shortened(names)} learn by in the backward pass, "
            "which checkpoints are to have: give CombinedOptimizer([dmp.fused_optimizer, yours]) "
            "of torchrec.optim.keyed"
        )


def make_state(optimizer: Optimizer, stored: Collection[str]) -> None:
    """Have an optimizer make what it lacks of the state that a checkpoint has, to be filled.

    Adam makes its state in the first step, and so does SGD with momentum. Here that is a step by
    gradients of zero, of those parameters alone, which are afterwards as they were.

    Args:
        optimizer: of TorchRec, which knows parameters by name.
        stored: names of the entries of the checkpoint.
    """
    named: dict[str, Any] = getattr(optimizer, "params", {})
    dense = {name: each for name, each in named.items() if isinstance(each, nn.Parameter)}
    known = optimizer.state
    lazy = {
        parameter: parameter.detach().clone()
        for name, parameter in dense.items()
        if parameter not in known and _has_state_of(name, stored)
    }
    if not lazy:
        return
    gradients = [(parameter, parameter.grad) for parameter in dense.values()]
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter in lazy else None
    optimizer.step()
    with torch.no_grad():
        for parameter, values in lazy.items():
            parameter.copy_(values)  # which a decay of weights has changed
    for parameter, gradient in gradients:
        parameter.grad = gradient


def trained_names(optimizer: Optimizer | None) -> list[str]:
    """The parameters of an optimizer of TorchRec, as checkpoints name them; none of None."""
    return [common_name(name) for name in getattr(optimizer, "params", {})]


def _unsaved(optimizer: Any) -> dict[str, str]:
    """What wrappers around a CombinedOptimizer keep of state from its state dict, and which do.

    It makes a new dict of its parts' state whenever it is asked: a wrapper adds to another one, as
    WarmupOptimizer its steps, and one that is a part itself has what there was when it was made.
    """
    found: dict[str, str] = {}
    while isinstance(optimizer, OptimizerWrapper):
        inner = _wrapped(optimizer)
        added = sorted(optimizer.params.keys() - inner.params.keys())
        found |= dict.fromkeys(added, type(optimizer).__name__)
        optimizer = inner
    parts = [*optimizer.optimizers] if isinstance(optimizer, CombinedOptimizer) else []
    for _, part in parts:
        inner = part
        while isinstance(inner, OptimizerWrapper):
            inner = _wrapped(inner)
        if inner is not part and isinstance(inner, CombinedOptimizer):
            state = inner.state
            made_since = [
                name for name, of in inner.params.items() if of in state and of not in part.state
            ]
            found |= dict.fromkeys(made_since, type(part).__name__)
        else:
            found |= _unsaved(inner)
    return found


def _wrapped(optimizer: OptimizerWrapper) -> Any:
    require_attributes(optimizer, "_optimizer")  # private, torchrec 1.6 to 1.9
    return optimizer._optimizer


def _has_state_of(name: str, stored: Collection[str]) -> bool:
    return any(entry.startswith(f"optimizer.state.{common_name(name)}.") for entry in stored)


def _values(document: Any) -> list[Any]:
    if not isinstance(document, dict):
        return [document]
    return [value for item in document.values() for value in _values(item)]


def _local(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor) and not hasattr(value, "local_shards"):
        return [value]
    return (
        [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else []
    )

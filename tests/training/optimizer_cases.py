"""Tables with optimizer entries on one rank, next to stock TorchRec's and to an unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.distributed.parity_cases import _whole
from tests.distributed.parity_model import NUM_STEPS, Form, ParityModel, Parts, make_batch
from tests.sharded import bare_registry, exact_sharders, shard
from torch import Tensor, nn
from torchrec import optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recd_plugins import load_registry
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.data.lower import lower
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.planning.prepared import apply_optimizers
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import copy_weights

PARTS = Parts(pooled=True, replicated=False, sequence=True)
#: By table, of pooled features and of sequences; s3 has none.
ENTRIES: dict[str, tuple[str, dict[str, float]]] = {
    "b0": ("torchrec.adagrad", {"learning_rate": 0.02, "eps": 1e-4}),
    "b1": ("torchrec.sgd", {"learning_rate": 0.3}),
    "b2": ("torchrec.rowwise_adagrad", {"learning_rate": 0.02, "eps": 1e-4}),
    "s0": ("torchrec.adagrad", {"learning_rate": 0.05, "eps": 1e-3}),
    "s1": ("torchrec.sgd", {"learning_rate": 0.1}),
    "s2": ("torchrec.rowwise_adagrad", {"learning_rate": 0.05, "eps": 1e-3}),
}
STOCK: dict[str, Any] = {
    "torchrec.sgd": optim.SGD,
    "torchrec.adagrad": optim.Adagrad,
    "torchrec.rowwise_adagrad": optim.RowWiseAdagrad,
}
UNSHARDED: dict[str, Any] = {
    **STOCK,
    "torchrec.sgd": torch.optim.SGD,
    "torchrec.adagrad": torch.optim.Adagrad,
}
FORMS: list[tuple[Form, bool]] = [("plain", False), ("unique", False), ("unique", True)]
#: As the training section has it, of tables without an entry and of the head.
TRAINING = {"learning_rate": 0.2}
_SHORT = {"learning_rate": "lr"}


@dataclass(frozen=True)
class Difference:
    """Largest differences of weights of one rank.

    Attributes:
        stock: from stock TorchRec's, by form of the batches and whether ids are coalesced.
        unsharded: of stock TorchRec's from those of an unsharded model.
        moved: by how much training moved each of these.
    """

    stock: dict[tuple[str, bool], float]
    unsharded: float
    moved: dict[str, float]


def run_cases(rank: int, world_size: int, path: Path, shardings: Sequence[str]) -> Any:
    """A difference for each sharding."""
    initial = {name: each.clone() for name, each in ParityModel(PARTS).state_dict().items()}
    plain = _unsharded(world_size)
    found = []
    for sharding in shardings:
        stock = _sharded(rank, sharding, "plain", _as_stock, initial, None)
        found.append(
            Difference(
                {
                    (form, coalesced): _largest(
                        stock, _sharded(rank, sharding, form, _as_entries(path), initial, coalesced)
                    )
                    for form, coalesced in FORMS
                },
                _largest(stock, plain),
                {name: float((stock[name] - initial[name]).abs().max()) for name in initial},
            )
        )
    return found


def _sharded(
    rank: int,
    sharding: str,
    form: Form,
    apply: Callable[[nn.Module], Any],
    initial: dict[str, Tensor],
    coalesced: bool | None,
) -> dict[str, Tensor]:
    """Weights after training; with stock sharders where ``coalesced`` is None."""
    model = ParityModel(PARTS)
    registry = apply(model)
    names = {table.name for table in tables_of(model)} if coalesced else set()
    if DEVICE.type == "cuda":  # where kernels of Adagrad take no bags of unique ids
        names = {name for name in names if name.startswith("s")}
    ours = exact_sharders(registry, names)
    params = dict(ours[0].fused_params or {})
    stock = [EmbeddingBagCollectionSharder(params), EmbeddingCollectionSharder(dict(params))]
    dmp = shard(model, stock if coalesced is None else ours, sharding)
    copy_weights(dmp.state_dict(), initial)
    optimizer = build_optimizer(dmp, registry.training)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = lower(make_batch(rank, step, form=form, even=True), PARTS.placement)
        dmp(batch.to(DEVICE))[0].backward()
        optimizer.step()
    return {name: _whole(tensor) for name, tensor in dmp.state_dict().items()}


def _unsharded(world_size: int) -> dict[str, Tensor]:
    model = ParityModel(PARTS)
    optimizers: list[torch.optim.Optimizer] = [
        UNSHARDED[use or "torchrec.sgd"]([parameter], **arguments)
        for parameter, use, arguments in _entries_of(model)
    ]
    for step in range(NUM_STEPS):
        batches = [make_batch(rank, step, form="plain", even=True) for rank in range(world_size)]
        losses = [model(lower(batch, PARTS.placement))[0] for batch in batches]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _as_entries(path: Path) -> Callable[[nn.Module], Any]:
    def apply(model: nn.Module) -> Any:
        registry = load_registry(path)
        apply_optimizers(
            registry, list(embedding_modules(model)), tables_of(model), DEVICE.type, {}
        )
        return registry

    return apply


def _as_stock(model: nn.Module) -> Any:
    for parameter, use, arguments in _entries_of(model):
        if use:
            apply_optimizer_in_backward(STOCK[use], [parameter], arguments)
    return bare_registry(TrainingSpec.model_validate({"optimizer": "sgd", **TRAINING}))


def _entries_of(model: nn.Module) -> Iterator[tuple[nn.Parameter, str, dict[str, float]]]:
    """Each parameter with the entry of its table, its options as TorchRec and torch take them."""
    for name, parameter in model.named_parameters():
        table = name.removesuffix(".weight").rpartition(".")[2]
        use, options = ENTRIES.get(table, ("", TRAINING))
        yield parameter, use, {_SHORT.get(key, key): value for key, value in options.items()}


def _largest(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)

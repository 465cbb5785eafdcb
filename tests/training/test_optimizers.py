"""Tables with optimizer entries train as with stock TorchRec."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.parity_cases import _whole
from tests.distributed.parity_model import NUM_STEPS, Form, ParityModel, Parts, make_batch
from tests.sharded import bare_registry, exact_sharders, shard
from torch import Tensor, nn
from torchrec import optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recd_plugins import RunConfig, load_registry
from recd_plugins.config.schema import ScheduleSpec, TrainingSpec
from recd_plugins.data.lower import lower
from recd_plugins.interfaces import TableStrategy
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.planning.prepared import apply_optimizers
from recd_plugins.runtime.errors import PluginError, RegistryError
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.optimizer import LearningRates, build_optimizer, factor
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
FORMS: list[tuple[Form, bool]] = [("plain", False), ("unique", False), ("unique", True)]
#: As the training section has it, of tables without an entry and of the head.
TRAINING = {"learning_rate": 0.2}
_SHORT = {"learning_rate": "lr"}


@dataclass(frozen=True)
class Difference:
    """Largest differences of weights of one rank.

    Attributes:
        stock: from stock TorchRec's, by form of the batches and whether ids are coalesced.
        moved: by how much training moved each of these.
    """

    stock: dict[tuple[str, bool], float]
    moved: dict[str, float]


def run_cases(rank: int, world_size: int, path: Path, shardings: Sequence[str]) -> Any:
    initial = {name: each.clone() for name, each in ParityModel(PARTS).state_dict().items()}
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


HEAD = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {user: 9, item: 9}}}
converter: {use: recd.kjt}
"""


def test_parity(tmp_path: Path) -> None:
    entries = [
        {"use": use, "tables": [table], "options": options}
        for table, (use, options) in ENTRIES.items()
    ]
    training = {"optimizer": "sgd", **TRAINING}
    path = tmp_path / "registry.yaml"
    path.write_text(f"{HEAD}optimizers: {json.dumps(entries)}\ntraining: {training}\n")
    for found in run_on_ranks(run_cases, 2, path, ["table_wise", "row_wise"]):
        for difference in found:
            assert max(difference.stock.values()) <= 1e-6
            assert min(difference.moved.values()) > 1e-4


PLUGIN = """
import torch
import torchrec.optim
from torch.optim import Adamax
from recd_plugins.api import DataError, Optimizer, RowUpdate, hookimpl

class Own(torch.optim.SGD):
    pass

RETURNED = {
    "unknown_class": RowUpdate(Own, {"lr": 0.1}),
    "momentum": RowUpdate(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": RowUpdate(torch.optim.Adagrad, {"lr": 0.1}),
}

class Mine(Optimizer):
    "Rates by width."
    name = "acme.mine"

    def update(self, table):
        if table.name == "t_refused":
            raise DataError("it is too wide")
        if table.name == "t_raised":
            return 1 / 0
        return RETURNED.get(table.name[2:], RowUpdate(torch.optim.SGD, {"lr": table.embedding_dim}))

@hookimpl
def register_plugins():
    return [Mine]
"""


def registry_of(folder: Path, text: str) -> RunConfig:
    (folder / "plugins").mkdir()
    (folder / "plugins" / "acme.py").write_text(PLUGIN)
    (folder / "registry.yaml").write_text(HEAD + text)
    return load_registry(folder / "registry.yaml", plugins_dir=folder / "plugins")


def model_of(*names: str, device: str = "meta") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=20, feature_names=[name[2:]]
            )
            for name in names
        ],
    )


def applied(
    registry: RunConfig,
    model: EmbeddingBagCollection,
    device_type: str | None = "cpu",
    parts: Mapping[str, TableStrategy] | None = None,
) -> EmbeddingBagCollection:
    apply_optimizers(
        registry, list(embedding_modules(model)), tables_of(model), device_type, parts or {}
    )
    return model


MINE = "optimizers:\n  - {use: acme.mine, tables: [t_a]}\n"


def test_a_plugin_of_ones_own_sees_its_tables(tmp_path: Path) -> None:
    model = applied(registry_of(tmp_path, MINE), model_of("t_a", "t_b"))
    weights = dict(model.named_parameters())
    assert weights["embedding_bags.t_a.weight"]._optimizer_kwargs == [{"lr": 8}]
    assert not hasattr(weights["embedding_bags.t_b.weight"], "_optimizer_kwargs")


def test_tables_that_have_no_memory_yet_need_none(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, MINE.replace("t_a", "t_adagrad"))
    with deferred_tables() as deferred:
        applied(registry, model_of("t_adagrad", device="cpu"))
    assert not deferred.touched


@pytest.mark.parametrize(
    ("table", "kind", "said"),
    [
        ("unknown_class", PluginError, r"returned Cannot cast .*acme.Own"),
        (
            "momentum",
            RegistryError,
            r"yaml:5 optimizers\[0\]: table t_momentum: .* nothing with mom",
        ),
        ("refused", RegistryError, r"yaml:5 optimizers\[0\]: it is too wide"),
        (
            "raised",
            ZeroDivisionError,
            r"acme.mine: update of table t_raised failed at .*acme.py:\d+",
        ),
    ],
)
def test_what_a_plugin_cannot_return(
    tmp_path: Path, table: str, kind: type[Exception], said: str
) -> None:
    registry = registry_of(tmp_path, MINE.replace("t_a", f"t_{table}"))
    with pytest.raises(kind, match=said):
        applied(registry, model_of(f"t_{table}"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sharding: [{use: torchrec.data_parallel, tables: [t_a]}]", "whole on every rank"),
        ("sharding: [{use: torchrec.row_wise, tables: [t_a]}]", "trains rows by training.optim"),
        ("cache: [{use: torchrec.uvm, tables: [t_a]}]", r"torchrec.uvm \(cache\[0\], line 6\)"),
    ],
)
def test_entries_that_train_rows_otherwise(tmp_path: Path, more: str, said: str) -> None:
    class Follows(TableStrategy):
        follows_optimizers = True

    registry = registry_of(tmp_path, f"{MINE}{more}\n")
    field = f"{more.partition(':')[0]}[0]"
    with pytest.raises(RegistryError, match=rf"yaml:5 optimizers\[0\]: table t_a.*{said}"):
        applied(
            registry, model_of("t_a"), parts={} if "parallel" in more else {field: TableStrategy()}
        )
    if "parallel" not in more:
        applied(registry, model_of("t_a"), parts={field: Follows()})


def test_tables_that_cannot_be_trained_so(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, MINE)
    with pytest.raises(RegistryError, match="t_a matches no table"):
        applied(registry, model_of("t_b"))
    twice = applied(registry, model_of("t_a"))
    with pytest.raises(RegistryError, match="t_a brings SGD already"):
        applied(registry, twice)
    with pytest.raises(RegistryError, match=r"t_a is in no EmbeddingBagCollection .* any more"):
        apply_optimizers(
            registry,
            list(embedding_modules(model_of("t_b"))),
            tables_of(model_of("t_a")),
            "cpu",
            {},
        )


def factors(num_steps: int, /, **schedule: object) -> list[float]:
    spec = ScheduleSpec.model_validate(schedule)
    return [factor(spec, step) for step in range(num_steps)]


def test_factors() -> None:
    assert factors(4) == [1, 1, 1, 1]
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(7, warmup=2, decay="linear", steps=6) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    cosine = factors(5, decay="cosine", steps=3, floor=0.2)
    assert cosine == pytest.approx([1, 0.8, 0.4, 0.2, 0.2])


def test_groups_keep_their_ratio_and_a_loaded_rate_does_not_count() -> None:
    tables, dense = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper({"tables": tables}, lambda p: torch.optim.SGD(p, lr=0.8)),
            KeyedOptimizerWrapper({"dense": dense}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ]
    )
    rates = LearningRates(optimizer, ScheduleSpec(warmup=2))
    optimizer.param_groups[0]["lr"] = 7.0  # as of a checkpoint
    for step, expected in enumerate([[0.4, 0.05], [0.8, 0.1], [0.8, 0.1]]):
        rates.set(step)
        assert [group["lr"] for group in optimizer.param_groups] == expected
    LearningRates(optimizer, None).set(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.1]

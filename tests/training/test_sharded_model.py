"""A run is put together as it is planned and alike on all ranks, also with deferred tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.plugin_files import write_plugins
from tests.sharded import CPU, bags, everyone, one_rank, sequences
from tests.small_registry import random_rows, write_registry
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from recd_plugins import load_registry
from recd_plugins.model.build import build_model
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.planning import choosing
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.step_cost import NO_COMPUTE
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import this_machine
from recd_plugins.runtime.errors import NoPlanError, PluginError, SetupError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training import sharded_model
from recd_plugins.training.rank_state import copy_weights, first_weights
from recd_plugins.training.sharded_model import build_sharded_model

SMALL: dict[str, Any] = {
    "dataset": random_rows(sparse={"a": 9, "b": 40}),
    "converter": {"use": "recd.ikjt"},
}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Any]:
    path = write_registry(
        tmp_path,
        **SMALL,
        pooling=[{"use": "recd.attention", "features": ["b"]}],
        sharding=[{"use": "torchrec.row_wise", "tables": ["t_b"]}],
    )
    with one_rank():
        yield load_registry(path)


@pytest.mark.parametrize("variant", ["plugins", "baseline"])
def test_a_run_has_the_plan_of_recd_plan(registry: Any, variant: Any) -> None:
    candidate = with_plugins(registry)
    candidate = candidate if variant == "plugins" else candidate.as_plain()
    kept = candidate.activation_bytes(measure_compute(registry), 16)
    planned = candidate.plan(this_machine(1).to_torchrec(), 16, kept).sharding
    assert str(build_sharded_model(registry, variant, CPU).dmp.plan) == str(planned)


@pytest.mark.parametrize("variant", ["plugins", "baseline"])
def test_no_plan_fits(registry: Any, variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = replace(NO_COMPUTE, rest_saved_bytes=1e12)
    monkeypatch.setattr(sharded_model, "measure_compute", lambda _: kept)
    with pytest.raises(NoPlanError):
        build_sharded_model(registry, variant, CPU)


def test_planning_draws_nothing(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> torch.Tensor:
        build_sharded_model(registry, "plugins", CPU)
        return torch.rand(3)

    after = counted()
    monkeypatch.setattr(sharded_model, "measure_compute", lambda _: NO_COMPUTE)
    assert torch.equal(counted(), after)


def _sets(model: Any) -> None:
    model.bags.embedding_bags["t_a"].weight.data.mul_(0)


def _fails(model: Any) -> None:
    if model.bags.embedding_bags["t_a"].weight.is_meta:
        raise PluginError("acme.model: build failed")


@pytest.mark.parametrize("use", [_sets, _fails, None])
def test_a_model_that_uses_its_tables_is_made_whole(
    registry: Any,
    use: Callable[[Any], None] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on_meta = []

    def built(*arguments: Any) -> Any:
        model: Any = build_model(*arguments)
        if all(each.is_meta for each in model.parameters()):  # to look at its size
            return model
        on_meta.append(model.bags.embedding_bags["t_a"].weight.is_meta)
        if use is not None:
            use(model)
        return model

    monkeypatch.setattr(sharded_model, "build_model", built)
    table = build_sharded_model(registry, "plugins", CPU).dmp.state_dict()[
        "bags.embedding_bags.t_a.weight"
    ]
    tensor = table.local_shards()[0].tensor if isinstance(table, ShardedTensor) else table
    assert on_meta == ([True] if use is None else [True, False])
    assert bool(tensor.any()) is (use is not _sets)
    assert ("each rank creates the unsharded model" in caplog.text) is (use is not None)


Case = Callable[[bool], Any]


def features(names: list[str]) -> KeyedJaggedTensor:
    ids, lengths = torch.arange(8) % 4, torch.ones(8, dtype=torch.int64)
    return KeyedJaggedTensor(names, ids, lengths=lengths)


def plan(differs: bool) -> None:
    with patch.object(
        recd_plugins.planning.planner.RegistryPlanner,
        "collective_plan",
        lambda self, module, sharders, _: self.plan(module, sharders),
    ):
        sharded(Model(), "table_wise" if differs else "row_wise")


def loader(differs: bool) -> None:
    dmp, batch = sharded(Model(), "row_wise"), {"bags": features(["b0", "b1"])}
    if differs:
        batch = recd_plugins.wrap(Model()).dedup.batch(batch)
    dmp(batch["bags"], features(["e0", "e1"]))


def run(differs: bool, path: Any) -> None:
    registry = load_registry(path).with_training({"seed": int(differs)})
    build_sharded_model(registry, "plugins", CPU)


def auto_finds_nothing(differs: bool, path: Any) -> None:
    def find(*_: Any) -> None:
        assert not differs, "rank 0 alone chooses"
        raise NoPlanError("nothing fits here")

    with patch.object(choosing, "_find", find):
        build_sharded_model(load_registry(path), "plugins", CPU)


def chosen(rank: int, world_size: int, path: Any) -> list[Any]:
    found = build_sharded_model(load_registry(path), "plugins", CPU)
    entries = found.prepared.registry.sharding
    return [str(found.prepared.chosen), [(e.plugin.name, e.patterns) for e in entries]]


def said(rank: int, world_size: int, case: Case, *paths: Any) -> str:
    try:
        case(rank == 1, *paths)
    except SetupError as error:
        return str(error)
    finally:
        dist.barrier()
    return "nothing"


OF_TRAINERS = {
    plan: 'sharding bags: the plan, t_b0.sharding_type is "row_wise" on rank 0, but "table_wise"',
    loader: (
        "rank 0 is at the form of the first batch of module 'bags', but rank 1 is at the first "
        "batch of dedup(loader)"
    ),
}


def test_a_trainer_is_told_what_differs() -> None:
    for case, expected in OF_TRAINERS.items():
        assert all(expected in text for text in run_on_ranks(said, 2, case))


PLUGIN = '''
import torch.distributed as dist

class Constrains(Sharding):
    """Row-wise on rank 0."""
    name = "acme.constrains"
    def constraints(self, tables):
        from torchrec.distributed.planner.types import ParameterConstraints
        kinds = ["table_wise" if dist.get_rank() else "row_wise"]
        return {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
'''


def constrains(_: bool, path: Any) -> None:
    registry = load_registry(path.with_name("constrains.yaml"), plugins_dir=path.parent / "plugins")
    build_sharded_model(registry, "plugins", CPU)


def test_a_run_is_told_what_differs(tmp_path: Path) -> None:
    path = write_registry(tmp_path, **SMALL)
    write_plugins(tmp_path, PLUGIN, "Constrains")
    entry = {"use": "acme.constrains", "tables": ["t_b"]}
    write_registry(tmp_path, "constrains.yaml", **SMALL, sharding=[entry])
    for seeds in run_on_ranks(said, 2, run, path):
        assert "planning: the registry file, training.seed is 0 on rank 0, but 1 on rank 1" in seeds
        assert "Use the same installation, command, registry file" in seeds
    differs = 'acme.constrains.t_b.sharding_types is ["row_wise"] on rank 0'
    for plans in run_on_ranks(said, 2, constrains, path):
        assert f"the constraints of plugins, {differs}" in plans


def test_auto_chooses_on_one_rank_for_all(tmp_path: Path) -> None:
    path = write_registry(tmp_path, **SMALL, sharding=[{"use": "auto"}])
    assert run_on_ranks(said, 2, auto_finds_nothing, path) == ["nothing fits here"] * 2
    first, second = run_on_ranks(chosen, 2, path)
    assert first == second
    assert first[0].startswith("auto chose ")


ROWS, DIM = 37, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags("b0", "b1", rows=ROWS, dim=DIM)
        self.rows = sequences("e0", "e1", rows=ROWS, dim=DIM)
        self.top = nn.Linear(DIM, 1)

    def forward(self, bags: KeyedJaggedTensor, rows: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(bags)["b0"].mean(0) + self.rows(rows)["e0"].values().mean(0)
        return self.top(pooled).mean()


def sharded(model: nn.Module, sharding: str) -> DistributedModelParallel:
    ready = recd_plugins.wrap(model, batch_size=4)
    dense = sharding == "data_parallel"
    of_bags = sharding in ("table_column_wise", "table_row_wise")  # alone
    constraints = {
        name: ParameterConstraints(
            sharding_types=["row_wise" if of_bags and name[2] == "e" else sharding],
            compute_kernels=["dense" if dense else "fused"],
            min_partition=4,
        )
        for name in ("t_b0", "t_b1", "t_e0", "t_e1")
    }
    sharders = ready.sharders(fused_params={"learning_rate": 0.1})
    planner = ready.planner(constraints=constraints)
    return DistributedModelParallel(
        ready.model,
        env=everyone(),
        device=CPU,
        plan=planner.collective_plan(ready.model, sharders, dist.group.WORLD),
        sharders=sharders,
    )


def parts(dmp: DistributedModelParallel) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, value in dmp.state_dict().items():
        whole = not isinstance(value, ShardedTensor)
        local: Any = [value] if whole else [shard.tensor for shard in value.local_shards()]
        found[name] = [tensor.detach().clone() for tensor in local]
    return found


def differing(rank: int, world_size: int, sharding: str) -> list[str]:
    variants = []
    for deferred in (False, True):
        torch.manual_seed(5)
        with deferred_tables() if deferred else nullcontext():
            model = Model()
        first = first_weights(model)
        torch.manual_seed(rank)  # what TorchRec draws is another on every rank
        dmp = sharded(model, sharding)
        state = dmp.state_dict()
        copy_weights(state, first)
        dmp.load_state_dict(state)
        variants.append((parts(dmp), torch.get_rng_state()))
    (whole, after), (made, also_after) = variants
    assert whole.keys() == made.keys()
    assert torch.equal(after, also_after), "later draws are what they were"
    return [
        name
        for name in whole
        if len(whole[name]) != len(made[name]) or not all(map(torch.equal, whole[name], made[name]))
    ]


SHARDINGS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
OF_NODES = ["table_row_wise", "table_column_wise"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sharding_starts_as_whole_tables_do(world_size: int) -> None:
    local = 2 if world_size == 4 else None
    for sharding in SHARDINGS + (OF_NODES if world_size == 4 else []):
        found = run_on_ranks(differing, world_size, sharding, local_world_size=local)
        assert found == [[]] * world_size, sharding

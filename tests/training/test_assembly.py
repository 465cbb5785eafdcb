"""A run is put together as it is planned, and falls back where its model cannot be deferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recd_plugins import load_registry
from recd_plugins.errors import NoPlanError, PluginError, SetupError
from recd_plugins.model.build import build_model
from recd_plugins.planning.compute import KeptActivations, measure_compute, measure_kept
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import load_topology, this_machine
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.training import assembly
from recd_plugins.training.assembly import Side, _equal_gradients_pay, assemble
from recd_plugins.values.stage_costs import StageCosts

CPU = torch.device("cpu")
REGISTRY = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {a: 9, b: 40}}}
converter: {use: recd.ikjt}
pooling: [{use: recd.attention, features: [b]}]
sharding: [{use: torchrec.row_wise, tables: [t_b]}]
training: {batch_size: 16, device: cpu}
model: {num_embeddings: 50, embedding_dim: 4, bottom_mlp: [4], top_mlp: [4]}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Any:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY)
    registry = load_registry(path)
    registry.dataset.prepare()
    return registry


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("side", ["plugins", "baseline"])
def test_a_run_has_the_plan_of_recd_plan(registry: Any, side: Any) -> None:
    candidate = with_plugins(registry)
    candidate = candidate if side == "plugins" else candidate.as_plain()
    kept = candidate.activation_bytes(measure_compute(registry), 16)
    planned = candidate.plan(this_machine(1).to_torchrec(), 16, kept).sharding
    assert str(assemble(registry, side, CPU).dmp.plan) == str(planned)


def test_activations_are_counted_alike(registry: Any) -> None:
    assert vars(measure_kept(registry)).items() <= vars(measure_compute(registry)).items()


@pytest.mark.parametrize("pipeline", ["", "pipeline: {use: torchrec.base}\n"])
def test_overlap_that_does_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pipeline: str
) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY + pipeline)
    registry = load_registry(path).with_training({"overlap": True})
    registry.dataset.prepare()
    sides: tuple[Side, ...] = ("baseline", "plugins")
    for side in sides:
        assert "overlap" not in caplog.text
        parts = assemble(registry, side, CPU)
        parts.prepared.train_pipeline(parts.dmp, parts.optimizer, CPU)
    said = "training.overlap is true and does nothing: the section pipeline says how steps overlap"
    assert (said in caplog.text) == bool(pipeline)


@pytest.mark.parametrize("side", ["plugins", "baseline"])
def test_activations_that_do_not_fit_leave_no_plan(
    registry: Any, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptActivations(rest_saved_bytes=1e12)
    monkeypatch.setattr(assembly, "measure_kept", lambda _: kept)
    with pytest.raises(NoPlanError):
        assemble(registry, side, CPU)


def test_planning_draws_nothing(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> torch.Tensor:
        assemble(registry, "plugins", CPU)
        return torch.rand(3)

    after = counted()
    monkeypatch.setattr(assembly, "measure_kept", lambda _: KeptActivations())
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

    monkeypatch.setattr(assembly, "build_model", built)
    table = assemble(registry, "plugins", CPU).dmp.state_dict()["bags.embedding_bags.t_a.weight"]
    tensor = table.local_shards()[0].tensor if isinstance(table, ShardedTensor) else table
    assert on_meta == ([True] if use is None else [True, False])
    assert bool(tensor.any()) is (use is not _sets)
    assert ("each rank makes the whole model" in caplog.text) is (use is not None)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{num_embeddings: 1000000000000}", "GB, of which bags.embedding_bags.t_"),
        ("{num_embeddings: 9, top_mlp: [1048576, 1048576]}", "of which top.over_arch."),
    ],
)
def test_a_model_larger_than_the_machine_is_refused(tmp_path: Path, model: str, said: str) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY.partition("model:")[0] + f"model: {model}\n")
    with pytest.raises(SetupError, match="the model's parameters take") as caught:
        assemble(load_registry(path), "plugins", CPU)
    assert said in str(caught.value)


LINKS: Any = SimpleNamespace(training=TrainingSpec())


@pytest.mark.parametrize(("bits_per_second", "pays"), [(200e6, True), (1e9, False), (1e10, False)])
def test_by_the_links_that_were_measured(bits_per_second: float, pays: bool) -> None:
    machine = load_topology("machine", nodes=2, ranks_per_node=1, device="cpu")
    costs = StageCosts.model_validate(
        {"all_to_all": {"bytes_across_nodes": 8 / bits_per_second, "collectives": 0.001}}
    )
    measured = machine.model_copy(update={"costs": costs})
    assert _equal_gradients_pay(LINKS, CPU, measured) is pays


def test_where_links_are_not_known() -> None:
    assert _equal_gradients_pay(LINKS, CPU, None)

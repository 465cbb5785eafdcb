"""A run is put together as it is planned, and falls back where its model cannot be deferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.small_registry import random_rows, write_registry
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recd_plugins import load_registry
from recd_plugins.model.build import build_model
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.step_cost import NO_COMPUTE
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import this_machine
from recd_plugins.runtime.errors import NoPlanError, PluginError
from recd_plugins.training import sharded_model
from recd_plugins.training.sharded_model import build_sharded_model

CPU = torch.device("cpu")


@pytest.fixture
def registry(tmp_path: Path) -> Any:
    registry = load_registry(
        write_registry(
            tmp_path,
            dataset=random_rows(sparse={"a": 9, "b": 40}),
            converter={"use": "recd.ikjt"},
            pooling=[{"use": "recd.attention", "features": ["b"]}],
            sharding=[{"use": "torchrec.row_wise", "tables": ["t_b"]}],
        )
    )
    registry.dataset.prepare()
    return registry


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("variant", ["plugins", "baseline"])
def test_a_run_has_the_plan_of_recd_plan(registry: Any, variant: Any) -> None:
    candidate = with_plugins(registry)
    candidate = candidate if variant == "plugins" else candidate.as_plain()
    kept = candidate.activation_bytes(measure_compute(registry), 16)
    planned = candidate.plan(this_machine(1).to_torchrec(), 16, kept).sharding
    assert str(build_sharded_model(registry, variant, CPU).dmp.plan) == str(planned)


@pytest.mark.parametrize("variant", ["plugins", "baseline"])
def test_activations_that_do_not_fit_leave_no_plan(
    registry: Any, variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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

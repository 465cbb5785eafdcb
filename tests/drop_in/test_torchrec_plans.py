"""TorchRec's planner and a trainer's own sharders decide as they do without this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.drop_in.matrix.modules import MODULES
from tests.sharded import configs
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

import recd_plugins

META = torch.device("meta")
Sizes = Sequence[tuple[int, int]]


def _tables(kind: Any, prefix: str, sizes: Sizes) -> list[Any]:
    numbered = enumerate(sizes)
    return [configs(kind, [f"{prefix}{n}"], rows, dim)[0] for n, (rows, dim) in numbered]


def bags(prefix: str, sizes: Sizes, *, weighted: bool = False) -> EmbeddingBagCollection:
    tables = _tables(EmbeddingBagConfig, prefix, sizes)
    for table in tables[1::2]:
        table.pooling = PoolingType.MEAN
    return EmbeddingBagCollection(tables, is_weighted=weighted, device=META)


def sequences(prefix: str, sizes: Sizes) -> EmbeddingCollection:
    return EmbeddingCollection(_tables(EmbeddingConfig, prefix, sizes), device=META)


def _beside_bags(path: str, name: str) -> dict[str, nn.Module]:
    return {path: MODULES[name].build(), "bags": bags("c", SMALL)}


SMALL, LARGE = [(40, 8), (300, 8), (7, 8)], [(424_241, 4), (72_543, 4), (5_000_000, 64)]
MODELS: dict[str, Callable[[], dict[str, nn.Module]]] = {
    "small bags": lambda: {"bags": bags("c", SMALL)},
    "large bags": lambda: {"bags": bags("c", LARGE)},
    "many bags": lambda: {"bags": bags("c", [(10 ** (i % 6 + 1), 16) for i in range(26)])},
    "weighted bags": lambda: {"bags": bags("c", [*SMALL, *LARGE], weighted=True)},
    "two towers": lambda: {"user": bags("c", LARGE[:2]), "item": bags("d", LARGE[1:])},
    "sequences": lambda: {"sequences": sequences("s", [(1_000, 32), (500_000, 32)])},
    "bags and sequences": lambda: {
        "bags": bags("c", LARGE),
        "sequences": sequences("s", [(1_000, 8)]),
    },
    **{
        short: partial(_beside_bags, short, name)
        for short, name in (
            ("processed", "FeatureProcessedEmbeddingBagCollection"),
            ("fused", "FusedEmbeddingBagCollection"),
            ("managed", "ManagedCollisionEmbeddingBagCollection"),
        )
    },
}


def model_of(kind: str) -> nn.ModuleDict:
    return nn.ModuleDict(MODELS[kind]())


def planned(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    world_size: int,
    device: str = "cpu",
    constraints: dict[str, ParameterConstraints] | None = None,
) -> object:
    topology = Topology(world_size, device, local_world_size=world_size)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    try:
        plan = planner.plan(model, sharders).plan
    except (RuntimeError, ValueError):
        return None
    return {
        f"{path}.{table}": (each.sharding_type, each.compute_kernel, each.ranks, repr(each))
        for path, of_module in plan.items()
        for table, each in of_module.items()  # type: ignore[attr-defined]
    }


def kinds(found: Any) -> dict[str, str]:
    return {table: chosen[0] for table, chosen in found.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_torchrecs_planner_makes_the_same_plan(kind: str, world_size: int) -> None:
    model = model_of(kind)
    ours = recd_plugins.wrap(model).sharders(get_default_sharders())
    for device in ("cpu", "cuda") if world_size == 2 else ("cpu",):
        stock = planned(model, get_default_sharders(), world_size, device)
        assert planned(model, ours, world_size, device) == stock
        assert stock or kind == "managed", "which TorchRec has no plan for"


def test_constraints_by_name_have_rows_split_on_cpu() -> None:
    model = model_of("large bags")
    sharders = recd_plugins.wrap(model).sharders()
    for wanted in (["row_wise"], ["table_row_wise"], ["row_wise", "table_wise"]):
        constraints = {"t_c0": ParameterConstraints(sharding_types=wanted)}
        found = kinds(planned(model, sharders, 2, constraints=constraints))
        assert found.pop("bags.t_c0") in wanted
        assert "row_wise" not in found.values()


@pytest.mark.parametrize(
    "base",
    [
        [EmbeddingBagCollectionSharder()],
        (EmbeddingBagCollectionSharder({"learning_rate": 0.1}),),
        [EmbeddingCollectionSharder()],
        [FusedEmbeddingBagCollectionSharder()],
        [ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder())],
        [EmbeddingCollectionSharder(), FusedEmbeddingBagCollectionSharder()],
    ],
    ids=lambda base: ", ".join(type(each).__name__ for each in base),
)
def test_modules_that_base_leaves_alone_stay(base: Sequence[ModuleSharder[nn.Module]]) -> None:
    ready = recd_plugins.wrap(model_of("bags and sequences"))
    types = {sharder.module_type for sharder in ready.sharders(base)}
    assert types == {sharder.module_type for sharder in base}


def test_a_module_of_which_base_shards_only_the_tables_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready = recd_plugins.wrap(model_of("managed"))
    ready.sharders([EmbeddingBagCollectionSharder()])
    inside = "module 'managed' (ManagedCollisionEmbeddingBagCollection)"
    assert f"'base' shards only the tables inside {inside}" in caplog.text
    caplog.clear()
    ready.sharders(get_default_sharders())
    assert not caplog.text

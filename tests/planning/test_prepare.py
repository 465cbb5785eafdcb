from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.drop_in.matrix.modules import MODULES, bag_configs
from tests.sharded import bags, sequences
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins import RunConfig, load_registry, prepare
from recd_plugins.config import Entry
from recd_plugins.interfaces import Cache, LookupKernels, Sharding, TableStrategy
from recd_plugins.interfaces.batch import Placement
from recd_plugins.interfaces.data_profile import DataProfile, FeatureProfile
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.planning.plan_context import rows_looked_up
from recd_plugins.planning.topologies import this_machine
from recd_plugins.runtime.errors import RegistryError, SetupError
from recd_plugins.sharding.build import lookup_kernels
from recd_plugins.training.session import write_topology


class OwnBags(EmbeddingBagCollection):
    pass


def model(kind: str | nn.Module) -> nn.Module:
    if isinstance(kind, nn.Module):
        left = kind
    else:
        left = OwnBags(tables=bag_configs()) if kind == "own" else MODULES[kind].build()
    return nn.ModuleDict({"bags": bags("x", rows=9), "left": left})


def registry_with(folder: Path, sharding: str) -> RunConfig:
    path = folder / "registry.yaml"
    path.write_text(
        "version: 1\n"
        "dataset: {use: recd.session_parquet, options: {path: t, sparse: [x]}}\n"
        f"converter: {{use: recd.kjt}}\n{sharding}\n"
    )
    return load_registry(path)


POOLED = Placement(pooled=("x", "a", "b"))
SEQUENCES = Placement(pooled=("x",), sequence=("a", "b"))


@pytest.mark.parametrize(
    ("kind", "placement", "features_with_rows"),
    [
        ("FeatureProcessedEmbeddingBagCollection", POOLED, {"x", "a", "b"}),
        ("FusedEmbeddingBagCollection", POOLED, {"x", "a", "b"}),
        # Raw ids are no rows.
        ("ManagedCollisionEmbeddingBagCollection", POOLED, {"x"}),
        ("ManagedCollisionEmbeddingCollection", SEQUENCES, {"x"}),
        ("own", POOLED, {"x", "a", "b"}),
    ],
)
def test_features_of_modules_that_are_left_alone_are_read(
    tmp_path: Path, kind: str, placement: Placement, features_with_rows: set[str]
) -> None:
    registry = registry_with(tmp_path, "")
    prepared = prepare(registry, model(kind))
    assert prepared.placement == placement
    assert set(prepared.num_embeddings) == features_with_rows
    assert [table.name for table in prepared.tables] == ["t_x"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            "ManagedCollisionEmbeddingBagCollection",
            "module 'left' has the type ManagedCollisionEmbeddingBagCollection, which",
        ),
        ("own", "module 'left' has the type OwnBags, a subclass of EmbeddingBagCollection, but"),
    ],
)
@pytest.mark.parametrize(
    "section",
    [
        "sharding:\n  - {use: torchrec.row_wise, tables: ['t_*']}",
        "sharding:\n  - {use: torchrec.planner, tables: [t_x, t_b], options: {coalesce: true}}",
        "cache:\n  - {use: torchrec.uvm, tables: ['*']}",
    ],
    ids=["pattern", "coalesced", "cache"],
)
def test_tables_left_alone_are_refused(tmp_path: Path, kind: str, why: str, section: str) -> None:
    registry = registry_with(tmp_path, section)
    kind_of_entry = section.partition(":")[0]
    with pytest.raises(RegistryError) as raised:
        prepare(registry, model(kind))
    problem = raised.value.problems[-1]
    assert (problem.line, problem.field) == (5, f"{kind_of_entry}[0].tables")
    assert problem.message.startswith(f"table 't_b' cannot be used in this entry, because {why}")


def test_a_topology_of_the_trainer_counts_where_it_is_planned(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    spec = this_machine(1).model_copy(update={"ddr_bandwidth": 1e9, "ranks_per_node": 2})
    write_topology(cluster, spec, "Own.")
    registry = registry_with(tmp_path, "").with_training({"ranks": 2})
    prepared = prepare(registry, model("FeatureProcessedEmbeddingBagCollection"), topology=cluster)
    profile = DataProfile({"x": FeatureProfile(1.0, False, 0.0, 0.0, 0.0)})
    planner = prepared.planner(profile=profile)
    assert planner._topology.ddr_mem_bw == 1e6  # bytes a millisecond


def entry(base: Any, field: str, **methods: Any) -> Entry[Any]:
    """An entry for the table t_x, of a plugin with these methods."""
    plugin = type("Own", (base,), {"name": "acme.own", **methods})
    return Entry(plugin(plugin.Options()), ("t_x",), field, 5)


@pytest.mark.parametrize(
    ("limit", "checked", "rows"),
    [(None, {}, {}), (100, {"x": 100}, {}), (9, {"x": 9}, {"x": 9}), (1 << 63, {"x": 1 << 63}, {})],
)
def test_a_sharding_that_maps_ids_says_their_limit(
    tmp_path: Path, limit: int | None, checked: dict[str, int], rows: dict[str, int]
) -> None:
    mapping = entry(Sharding, "sharding[0]", id_limit=lambda self, table: limit)
    registry = replace(registry_with(tmp_path, ""), sharding=(mapping,))
    made = model("ManagedCollisionEmbeddingBagCollection")
    assert rows_looked_up(registry, list(embedding_modules(made))) == rows
    assert prepare(registry, made).num_embeddings == checked


def with_strategy(folder: Path, *cache: Entry[Any], **methods: Any) -> RunConfig:
    strategy = type("Strategy", (TableStrategy,), methods)
    sharding = entry(Sharding, "sharding[0]", strategy=lambda self, *_: strategy())
    return replace(registry_with(folder, ""), sharding=(sharding,), cache=cache)


def kernels(made_by: str) -> Any:
    names = {"made_by": made_by, "tables": ("t_x",), "compute_kernel": "fused"}
    of_tables: Any = type("Kernels", (LookupKernels,), {**names, "bags": None, "sequences": None})
    return classmethod(lambda cls, parts: of_tables())


def test_of_two_kernels_of_a_table_those_of_its_cache_look_it_up(tmp_path: Path) -> None:
    strategy = type("CacheStrategy", (TableStrategy,), {"kernels": kernels("cache")})
    methods = {"check": lambda self, device: None, "strategy": lambda self, *_: strategy()}
    cache = entry(Cache, "cache[0]", **methods)
    registry = with_strategy(tmp_path, cache, kernels=kernels("sharding"))
    made: Any = lookup_kernels(prepare(registry, model("EmbeddingBagCollection")))
    assert [each.made_by for each in made] == ["cache", "sharding"]


OF_GPUS = {"ranks": 8, "ranks_per_node": 8, "topology": "dgx-h100"}


def test_entries_decide_for_the_device_that_tables_will_be_on(tmp_path: Path) -> None:
    registry = with_strategy(tmp_path).with_training(OF_GPUS)
    with pytest.raises(SetupError, match="dgx-h100' has ranks on cuda, but this run trains on cp"):
        prepare(registry, model("EmbeddingBagCollection"))
    prepared = prepare(registry, model(nn.Identity()), device=torch.device("cuda"))
    assert prepared.context.device_type == "cuda"


@pytest.mark.parametrize("collection", [bags, sequences])
def test_tables_of_one_feature_coalesce_together(tmp_path: Path, collection: Any) -> None:
    section = "sharding:\n  - {use: torchrec.planner, tables: [t_z], options: {coalesce: true}}"
    tables = collection("y", "z", rows=9, feature_names=["x"])
    with pytest.raises(RegistryError) as raised:
        prepare(registry_with(tmp_path, section), model(tables))
    (problem,) = raised.value.problems
    assert (problem.line, problem.field) == (5, "sharding[0]")
    assert problem.message.startswith("feature 'x' looks up the tables 't_y', 't_z', but only 't_z")


def test_tables_of_nccl_are_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = "cpu:gloo,cuda:nccl"
    group = SimpleNamespace(is_initialized=lambda: True, get_backend_config=lambda: backends)
    monkeypatch.setattr("recd_plugins.planning.choosing.dist", group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    registry = registry_with(tmp_path, "").with_training(OF_GPUS)
    prepared = prepare(registry, model(nn.Identity()))
    assert prepared.context.device_type == "cuda"
    with pytest.raises(SetupError, match="this run trains on cpu"):
        prepare(registry.with_training({"device": "cpu"}), model(nn.Identity()))

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sharded import configs, sequences
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugin_torchrec.shardings import (
    ColumnWise,
    DataParallel,
    Planner,
    RowWise,
    TableWise,
    Uvm,
)
from recd_plugins import RunConfig
from recd_plugins.config import Entry
from recd_plugins.config.schema import RegistrySpec
from recd_plugins.data.plain import PlainConverter
from recd_plugins.interfaces import Sharding, Table
from recd_plugins.interfaces.batch import Placement
from recd_plugins.interfaces.data_profile import DataProfile, FeatureProfile
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.planning.constraints import table_constraints, table_optimizers
from recd_plugins.planning.planner import SortedEnumerator
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.topologies import default_topology
from recd_plugins.runtime.errors import RecdError, SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.sharders import stock_sharders

BATCH_SIZE = 512


class Model(nn.Module):
    """Pooled tables a (features f, g) and b, unpooled table s, without memory."""

    def __init__(self, rows: int = 1000) -> None:
        super().__init__()
        meta, config = torch.device("meta"), EmbeddingBagConfig
        tables = configs(config, "a", rows, 16, name="a", feature_names=["f", "g"])
        tables += configs(config, "h", rows, 16, name="b")
        self.bags = EmbeddingBagCollection(tables=tables, device=meta)
        self.sequences = sequences("i", rows=rows, dim=16, name="s", device=meta)


def registry(
    *sharding: Any, cache: Sequence[Any] = (), optimizer: str = "sgd", wire: str = "fp32"
) -> RunConfig:
    training = {"batch_size": BATCH_SIZE, "optimizer": optimizer, "wire": wire}
    spec = RegistrySpec.model_validate({"version": 1, "training": training})

    def entries(kind: str, pairs: Sequence[Any]) -> tuple[Entry[Any], ...]:
        return tuple(
            Entry(plugin, tuple(patterns), f"{kind}[{index}]", 10 + index)
            for index, (plugin, patterns) in enumerate(pairs)
        )

    nothing: Any = None
    return RunConfig(
        path=Path("registry.yaml"),
        spec=spec,
        dataset=nothing,
        converter=PlainConverter(PlainConverter.Options()),
        preprocessing=(),
        pooling=(),
        sharding=entries("sharding", sharding),
        cache=entries("cache", cache),
    )


def prepared(reg: RunConfig, model: nn.Module | None = None) -> Prepared:
    model = Model() if model is None else model
    return Prepared(reg, model, Placement(), {}, tuple(tables_of(model)))


def make(plugin: type, **options: Any) -> Any:
    return plugin(plugin.Options(**options))


def profile(**dedupe_factors: float) -> DataProfile:
    """One id a row; features with a factor store that many rows once in a batch."""
    return DataProfile(
        {
            name: FeatureProfile(1.0, True, *[(1 - 1 / factor) * BATCH_SIZE / (BATCH_SIZE - 1)] * 3)
            for name, factor in dedupe_factors.items()
        }
    )


def enumerated(
    reg: RunConfig, model: nn.Module, topology: Topology, sharders: Any = None, **arguments: Any
) -> list[ShardingOption]:
    ready = prepared(reg, model)
    sharders = ready.sharders() if sharders is None else sharders
    arguments = {"profile": profile(), "device_type": "cpu", **arguments}
    constraints = table_constraints(ready, tables_of(model), **arguments)
    return SortedEnumerator(topology, constraints, reg.training).enumerate(model, sharders)


def options(
    reg: RunConfig, known: DataProfile, model: nn.Module
) -> dict[tuple[str, str], ShardingOption]:
    found = enumerated(reg, model, default_topology(2), profile=known, replicate=True)
    return {(option.name, option.sharding_type): option for option in found}


def chosen(reg: RunConfig, model: nn.Module, **arguments: Any) -> dict[str, str]:
    ready = prepared(reg, model)
    planner = ready.planner(world_size=2, **{"profile": profile(), **arguments})
    plan = planner.plan(model, ready.sharders())
    return {
        name: sharding.sharding_type
        for tables in plan.plan.values()
        for name, sharding in tables.items()
    }


@pytest.mark.parametrize(
    ("table", "kind"),
    [("a", "table_wise"), ("b", "row_wise"), ("s", "column_wise"), ("s", "row_wise")],
)
def test_a_dedupe_factor_divides_the_estimates(table: str, kind: str) -> None:
    model = Model()
    plain = options(registry(), profile(), model)[table, kind].shards[0]
    unique = options(registry(), profile(f=8.0, g=8.0, h=8.0, i=8.0), model)[table, kind].shards[0]
    for part in ("fwd_compute", "fwd_comms", "bwd_compute"):
        assert getattr(plain.perf, part) > 0
        assert getattr(plain.perf, part) == pytest.approx(8 * getattr(unique.perf, part))
    # Beyond the weights there are ids and embeddings, which shrink.
    weights = 4 * plain.size[0] * plain.size[1]
    shrunk = 8 * (unique.storage.ddr - weights)
    assert plain.storage.ddr - weights == pytest.approx(shrunk, rel=0.02)


def test_features_of_one_table_have_factors_of_their_own() -> None:
    constraints = table_constraints(
        prepared(registry()), tables_of(Model()), profile=profile(f=4.0, i=1e9), device_type="cpu"
    )
    assert constraints["a"].batch_sizes == [BATCH_SIZE // 4, BATCH_SIZE]
    assert len(constraints["a"].pooling_factors) == 2
    assert constraints["b"].batch_sizes == [BATCH_SIZE]
    assert constraints["s"].batch_sizes == [1]


def test_torchrecs_sharders_replicate_deduplicated_tables_only_where_a_plugin_does() -> None:
    model = Model(rows=8)
    assert ("a", "data_parallel") in options(registry(), profile(), model)
    deduplicated = options(registry(), profile(f=4.0), model)
    # b shares a's input, so it gets variable batches too.
    assert not {("a", "data_parallel"), ("b", "data_parallel")} & deduplicated.keys()
    claimed = options(registry((make(DataParallel), ["b"])), profile(h=4.0), model)
    assert [key for key in claimed if key[0] == "b"] == [("b", "data_parallel")]
    assert ("a", "data_parallel") in claimed  # no other deduplicated feature is left


@pytest.mark.parametrize("rows", [8, 100_000])
def test_small_tables_are_replicated_where_an_entry_says_that_they_may_be(rows: int) -> None:
    model, known = Model(rows=rows), profile(f=4.0, s=4.0)
    reg = registry((make(Planner, replicate=True), ["a", "b", "s"]))
    kinds = chosen(reg, model, profile=known, replicate=True)
    assert [kind == "data_parallel" for kind in kinds.values()] == [rows == 8] * 3
    unasked = chosen(registry(), model, profile=known, replicate=True)
    assert "data_parallel" not in unasked.values()
    stock = prepared(reg, model).planner(world_size=2, profile=known, replicate=True)
    plan = stock.plan(model, stock_sharders(reg.training))
    assert "data_parallel" not in {each.sharding_type for each in plan.plan["bags"].values()}


def test_bags_beside_coalesced_ones_are_not_replicated() -> None:
    may = make(Planner, replicate=True)
    reg = registry((make(RowWise, coalesce=True), ["a"]), (may, ["b"]))
    ready = replace(prepared(reg, Model(rows=8)), coalesced=frozenset({"a"}))
    planner = ready.planner(world_size=2, profile=profile(), replicate=True)
    plan = planner.plan(ready.model, ready.sharders())
    assert plan.plan["bags"]["b"].sharding_type != "data_parallel"


def test_plugins_decide() -> None:
    reg = registry((make(TableWise), ["a"]), (make(RowWise), ["b"]), (make(ColumnWise), ["s"]))
    model = Model()
    assert chosen(reg, model) == {"a": "table_wise", "b": "row_wise", "s": "column_wise"}
    ready = prepared(reg, model)
    plan = ready.planner(world_size=2, profile=profile()).plan(model, ready.sharders())
    spec = plan.plan["sequences"]["s"].sharding_spec
    assert [shard.shard_sizes for shard in spec.shards] == [[1000, 8], [1000, 8]]


def test_no_plan_fits() -> None:
    message = r"no plan fits.* 'a' \(58\.2 TiB; allowed sharding types: table_wise\)"
    with pytest.raises(SetupError, match=message):
        chosen(registry((make(TableWise), ["a"])), Model(rows=10**12))


def test_no_option_is_left() -> None:
    message = "table 'b' cannot be sharded .* kernels 'fused_uvm_caching' on cpu"
    with pytest.raises(SetupError, match=message):
        chosen(registry(cache=[(make(Uvm), ["b"])]), Model())
    reg = registry((make(RowWise), ["a"]))
    planner = prepared(reg).planner(world_size=2, profile=profile())
    with pytest.raises(SetupError, match="table 'a' cannot be sharded 'row_wise' on cpu"):
        planner.plan(Model(), stock_sharders(reg.training))


class Constrains(Sharding):
    name = "test.constrains"
    result: Any

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        return self.result


def test_a_kernel_without_a_sharding_brings_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    plugin = make(Constrains)
    plugin.result = {"b": ParameterConstraints(compute_kernels=["fused"])}
    assert chosen(registry((plugin, ["b"])), Model(rows=8))["b"] != "data_parallel"
    assert "No available compute kernels" not in caplog.text


def test_contradicting_plugins() -> None:
    wide = make(Constrains)
    wide.result = {"b": ParameterConstraints(compute_kernels=["fused"])}
    reg = registry((wide, ["b"]), cache=[(make(Uvm), ["b"])])
    message = (
        r"registry.yaml:10 cache\[0\]: table 'b': 'torchrec.uvm' and 'test.constrains' set "
        "different compute_kernels"
    )
    with pytest.raises(RecdError, match=message):
        prepared(reg).planner(world_size=2, profile=profile())
    message = (
        r"^table 'a': 'planner\(constraints=...\)' and 'torchrec.row_wise' set different "
        r"sharding_types \(\['table_wise'\] and \['row_wise'\]\)\. Remove the table from one"
    )
    wishes = {"a": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(SetupError, match=message):
        kinds_of_a(registry((make(RowWise), ["a"])), Model(), wishes=wishes)


def test_sharding_and_cache_are_merged() -> None:
    reg = registry((make(RowWise), ["b"]), cache=[(make(Uvm, load_factor=0.5), ["b"])])
    given: Any = {"profile": profile(), "device_type": "cuda"}
    constraints = table_constraints(prepared(reg), tables_of(Model()), **given)["b"]
    assert constraints.sharding_types == ["row_wise"]
    assert constraints.compute_kernels == ["fused_uvm_caching"]
    assert constraints.cache_params.load_factor == 0.5


def test_the_plan_is_the_same_in_every_process() -> None:
    script = (
        "from tests.planning.test_planner import Model, registry, options, profile\n"
        "print([*options(registry(), profile(f=2.0), Model())])\n"
    )
    # Hashes of strings are others in each interpreter.
    command = [sys.executable, "-c", script]
    elsewhere = subprocess.check_output(command, cwd=Path(__file__).parents[2], text=True)
    assert elsewhere == f"{[*options(registry(), profile(f=2.0), Model())]}\n"


# What a trainer brings: optimizers in the backward pass, constraints, modules.

COLUMN_WISE = {"column_wise", "table_column_wise"}


def kinds_of_a(
    reg: Any,
    model: nn.Module,
    sharders: Any = None,
    *,
    replicate: bool = True,
    wishes: dict[str, ParameterConstraints] | None = None,
) -> set[str]:
    sharders = prepared(reg, model).sharders() if sharders is None else sharders
    wanted = {"optimizers": table_optimizers(model, sharders), "wishes": wishes}
    topology = default_topology(2)
    found = enumerated(reg, model, topology, sharders, replicate=replicate, **wanted)
    return {option.sharding_type for option in found if option.name == "a"}


def bringing(optimizer: type[torch.optim.Optimizer]) -> Model:
    model = Model()
    apply_optimizer_in_backward(optimizer, model.bags.parameters(), {"lr": 0.1})
    return model


def test_only_tables_that_the_dense_optimizer_trains_alike_are_replicated() -> None:
    assert "data_parallel" in kinds_of_a(registry(), Model())
    assert "data_parallel" not in kinds_of_a(registry(), Model(), replicate=False)
    other = build_sharders(prepared(registry()), fused_params={"weight_decay": 0.1})
    assert "data_parallel" not in kinds_of_a(registry(), Model(), other)
    assert "data_parallel" not in kinds_of_a(registry(), bringing(torch.optim.SGD))
    wish = {"a": ParameterConstraints(sharding_types=["data_parallel", "table_wise"])}
    assert kinds_of_a(registry(), Model(), wishes=wish) == {"data_parallel", "table_wise"}
    assert kinds_of_a(registry(), bringing(torch.optim.SGD), wishes=wish) == {"table_wise"}


@pytest.mark.parametrize("plugin", [True, False], ids=["entry", "constraints"])
def test_replicating_a_table_that_brings_an_optimizer_is_refused(plugin: bool) -> None:
    asked = {"a": ParameterConstraints(sharding_types=["data_parallel"])}
    reg = registry((make(DataParallel), ["a"])) if plugin else registry()
    message = (
        "table 'a' is data-parallel, but DistributedModelParallel would drop its optimizer "
        r"RowWiseAdagrad \(apply_optimizer_in_backward\)"
    )
    with pytest.raises(SetupError, match=message):
        kinds_of_a(reg, bringing(RowWiseAdagrad), wishes=None if plugin else asked)


def test_columns_are_split_as_the_tables_own_optimizer_allows() -> None:
    of_adagrad = registry(optimizer="rowwise_adagrad")
    assert kinds_of_a(registry(), Model()) >= COLUMN_WISE
    assert not COLUMN_WISE & kinds_of_a(of_adagrad, Model())
    assert not COLUMN_WISE & kinds_of_a(registry(), bringing(RowWiseAdagrad))
    assert kinds_of_a(of_adagrad, bringing(torch.optim.SGD)) >= COLUMN_WISE
    of_one_name = nn.ModuleDict({"first": bringing(RowWiseAdagrad), "second": Model()})
    assert not (COLUMN_WISE | {"data_parallel"}) & kinds_of_a(registry(), of_one_name)
    of_params: Any = [EmbeddingBagCollectionSharder({"learning_rate": 0.1})]  # FBGEMM's SGD
    sharders = build_sharders(prepared(of_adagrad)) + of_params
    assert kinds_of_a(of_adagrad, Model(), sharders) >= COLUMN_WISE


def test_constraints_of_a_trainer_go_before_the_data() -> None:
    wishes = {"a": ParameterConstraints(batch_sizes=[7, 7], min_partition=4)}
    given: Any = {"profile": profile(f=8.0), "device_type": "cpu", "wishes": wishes}
    ready = prepared(registry((make(RowWise), ["a"])))
    found = table_constraints(ready, tables_of(Model()), **given)["a"]
    assert (found.batch_sizes, found.min_partition) == ([7, 7], 4)
    assert found.sharding_types == ["row_wise"]


class OwnProcessed(FeatureProcessedEmbeddingBagCollection):
    pass


def test_a_module_that_is_sharded_as_a_whole_needs_a_sharder() -> None:
    bags = Model().bags
    bags._is_weighted = True
    processors = PositionWeightedModuleCollection(dict.fromkeys(["f", "g", "h"], 3))
    model = nn.ModuleDict({"own": OwnProcessed(bags, processors)})
    ready = prepared(registry())
    planner = ready.planner(world_size=2, profile=profile())
    message = "'own' has the type OwnProcessed, which .*\. No sharder for this type was passed"
    with pytest.raises(SetupError, match=message):
        planner.plan(model, ready.sharders())


def test_one_gpu_has_whole_tables() -> None:
    def kinds(world_size: int) -> set[str]:
        topology = Topology(world_size, "cuda", local_world_size=world_size)
        found = enumerated(registry(), Model(), topology, device_type="cuda")
        return {each.sharding_type for each in found if each.compute_kernel == "fused"}

    assert kinds(1) == {"table_wise"}
    assert kinds(2) > {"table_wise", "row_wise"}

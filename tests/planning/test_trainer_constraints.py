"""What a trainer brings to the planner: optimizers in the backward pass, constraints, modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.test_planner import Model, make, prepared, profile, registry
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugin_torchrec.shardings import DataParallel, RowWise
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.planning.constraints import table_constraints, table_optimizers
from recd_plugins.planning.planner import SortedEnumerator, build_planner
from recd_plugins.planning.topologies import default_topology
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders

COLUMN_WISE = {"column_wise", "table_column_wise"}


def kinds(
    reg: Any,
    model: nn.Module,
    sharders: Any = None,
    *,
    replicate: bool = True,
    wishes: dict[str, ParameterConstraints] | None = None,
) -> set[str]:
    """What the planner may do with table a."""
    ready = prepared(reg, model)
    sharders = ready.sharders() if sharders is None else sharders
    constraints = table_constraints(
        ready,
        tables_of(model),
        profile=profile(),
        device_type="cpu",
        optimizers=table_optimizers(model, sharders),
        replicate=replicate,
        wishes=wishes,
    )
    found = SortedEnumerator(default_topology(2), constraints, reg.training)
    return {o.sharding_type for o in found.enumerate(model, sharders) if o.name == "a"}


def bringing(optimizer: type[torch.optim.Optimizer]) -> Model:
    model = Model()
    apply_optimizer_in_backward(optimizer, model.bags.parameters(), {"lr": 0.1})
    return model


def test_data_parallel_is_nobodys_choice_unless_the_dense_optimizer_has_the_rule() -> None:
    assert "data_parallel" in kinds(registry(), Model())
    assert "data_parallel" not in kinds(registry(), Model(), replicate=False)
    other = build_sharders(prepared(registry()), fused_params={"weight_decay": 0.1})
    assert "data_parallel" not in kinds(registry(), Model(), other)


def test_tables_that_bring_an_optimizer_are_not_replicated() -> None:
    assert "data_parallel" not in kinds(registry(), bringing(torch.optim.SGD))
    wish = {"a": ParameterConstraints(sharding_types=["data_parallel", "table_wise"])}
    assert kinds(registry(), Model(), wishes=wish) == {"data_parallel", "table_wise"}
    assert kinds(registry(), bringing(torch.optim.SGD), wishes=wish) == {"table_wise"}


@pytest.mark.parametrize("plugin", [True, False], ids=["entry", "constraints"])
def test_replicating_a_table_that_brings_an_optimizer_is_refused(plugin: bool) -> None:
    asked = {"a": ParameterConstraints(sharding_types=["data_parallel"])}
    reg = registry((make(DataParallel), ["a"])) if plugin else registry()
    message = (
        "table a is to be data-parallel, and its parameter brings RowWiseAdagrad "
        r"\(apply_optimizer_in_backward\), which DistributedModelParallel drops"
    )
    with pytest.raises(SetupError, match=message):
        kinds(reg, bringing(RowWiseAdagrad), wishes=None if plugin else asked)


def test_columns_are_split_as_the_tables_own_optimizer_allows() -> None:
    of_adagrad = registry(optimizer="rowwise_adagrad")
    assert kinds(registry(), Model()) >= COLUMN_WISE
    assert not COLUMN_WISE & kinds(of_adagrad, Model())
    assert not COLUMN_WISE & kinds(registry(), bringing(RowWiseAdagrad))
    assert kinds(of_adagrad, bringing(torch.optim.SGD)) >= COLUMN_WISE
    of_params: Any = [EmbeddingBagCollectionSharder({"learning_rate": 0.1})]  # FBGEMM's SGD
    assert (
        kinds(of_adagrad, Model(), build_sharders(prepared(of_adagrad)) + of_params) >= COLUMN_WISE
    )


def test_of_tables_of_one_name_none_loses_its_optimizer() -> None:
    model = nn.ModuleDict({"first": bringing(RowWiseAdagrad), "second": Model()})
    assert not (COLUMN_WISE | {"data_parallel"}) & kinds(registry(), model)


def test_constraints_of_a_trainer_go_before_the_data() -> None:
    wishes = {"a": ParameterConstraints(batch_sizes=[7, 7], min_partition=4)}
    constraints = table_constraints(
        prepared(registry((make(RowWise), ["a"]))),
        tables_of(Model()),
        profile=profile(f=8.0),
        device_type="cpu",
        wishes=wishes,
    )
    assert constraints["a"].batch_sizes == [7, 7]
    assert constraints["a"].min_partition == 4
    assert constraints["a"].sharding_types == ["row_wise"]


def test_constraints_that_contradict_are_refused() -> None:
    wishes = {"a": ParameterConstraints(sharding_types=["table_wise"])}
    message = (
        r"^table a: planner\(constraints=...\) and torchrec.row_wise set different "
        r"sharding_types \(\['table_wise'\] and \['row_wise'\]\); leave the table to one"
    )
    with pytest.raises(SetupError, match=message):
        kinds(registry((make(RowWise), ["a"])), Model(), wishes=wishes)


class OwnProcessed(FeatureProcessedEmbeddingBagCollection):
    pass


def test_a_module_that_is_sharded_as_a_whole_needs_a_sharder() -> None:
    bags = Model().bags
    bags._is_weighted = True
    processors = PositionWeightedModuleCollection(dict.fromkeys(["f", "g", "h"], 3))
    model = nn.ModuleDict({"own": OwnProcessed(bags, processors)})
    ready = prepared(registry())
    planner = build_planner(ready, world_size=2, profile=profile())
    message = "own is a OwnProcessed, which .*; but no sharder is for that type, .* inside"
    with pytest.raises(SetupError, match=message):
        planner.plan(model, ready.sharders())

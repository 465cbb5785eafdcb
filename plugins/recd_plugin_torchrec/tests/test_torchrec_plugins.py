from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from recd_plugin_torchrec.optimizers import RowWiseAdagrad, Sgd
from recd_plugin_torchrec.shardings import (
    ColumnWise,
    DataParallel,
    Planner,
    RowWise,
    TableWise,
    Uvm,
)
from recd_plugins.interfaces import Table
from recd_plugins.runtime.errors import SetupError

TABLE = Table("t", ("f",), 100, 16, pooled=True)


@pytest.mark.parametrize("plugin", [TableWise, RowWise, ColumnWise, DataParallel])
def test_sharding_types(plugin) -> None:
    constraints = plugin(plugin.Options()).constraints([TABLE])
    assert constraints["t"].sharding_types == [plugin.name.removeprefix("torchrec.")]
    assert plugin.replicates is (plugin is DataParallel)


def test_all_but_data_parallel_coalesce() -> None:
    for plugin in (TableWise, RowWise, ColumnWise, Planner):
        assert not plugin(plugin.Options()).coalesces
        assert plugin(plugin.Options(coalesce=True)).coalesces
    with pytest.raises(ValidationError):
        DataParallel.Options.model_validate({"coalesce": True})
    assert Planner(Planner.Options()).constraints([TABLE]) == {}


def test_column_shards() -> None:
    four = ColumnWise(ColumnWise.Options(shards=4))
    assert four.constraints([TABLE])["t"].min_partition == 4
    with pytest.raises(SetupError, match=r"table 't' has embedding_dim 16, .* multiple of 32"):
        ColumnWise(ColumnWise.Options(shards=8)).constraints([TABLE])
    with pytest.raises(ValidationError):
        ColumnWise.Options(shards=1)


def test_uvm() -> None:
    uvm = Uvm(Uvm.Options(load_factor=0.1, algorithm="lfu"))
    uvm.check(torch.device("cuda"))
    with pytest.raises(SetupError, match=r"'torchrec.uvm' needs CUDA.*enabled: false"):
        uvm.check(torch.device("cpu"))
    constraints = uvm.constraints([TABLE])["t"]
    assert constraints.compute_kernels == ["fused_uvm_caching"]
    assert constraints.cache_params.load_factor == 0.1
    assert constraints.cache_params.algorithm.name == "LFU"
    with pytest.raises(ValidationError):
        Uvm.Options(load_factor=0)


def test_a_rate_of_0_keeps_a_table_and_what_becomes_0_is_refused() -> None:
    assert Sgd.Options(learning_rate=0).model_dump() == {"learning_rate": 0}
    with pytest.raises(ValidationError, match="1e-40 is too small for float32"):
        Sgd.Options(learning_rate=1e-40)


def test_a_mode_of_a_decay_that_there_is_not_is_refused() -> None:
    options = {"learning_rate": 0.1, "weight_decay_mode": "decouple"}
    with pytest.raises(ValidationError, match="'weight_decay' is 0"):
        RowWiseAdagrad.Options.model_validate(options)
    RowWiseAdagrad.Options.model_validate({**options, "weight_decay": 0.1})

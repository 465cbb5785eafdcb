"""Test suites for sharding and cache plugins."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import (
    ModuleSharder,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.interfaces import (
    Cache,
    PlanContext,
    SharderArguments,
    Sharding,
    Table,
    TableStrategy,
    TrainingData,
)
from recd_plugins.interfaces.access import AccessProfile, TableAccess
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.planning.constraints import set_fields
from recd_plugins.planning.topologies import TopologySpec, this_machine
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.contracts.plugin import PluginContract


class SkewedData(TrainingData):
    """Training data in which an eighth of the rows of each table is read 400 times as often."""

    def profile(self) -> DataProfile:
        return DataProfile({})

    def access(
        self,
        tables: Sequence[Table],
        rows: int | None,  # noqa: ARG002
        *,
        deduplicated: bool = True,  # noqa: ARG002
    ) -> AccessProfile:
        return AccessProfile({table.name: self._access(table) for table in tables}, "a test")

    def _access(self, table: Table) -> TableAccess:
        ids = np.arange(table.num_embeddings)
        counts = np.where(ids < table.num_embeddings // 8, 400.0, 1.0)
        return TableAccess.from_counts(
            table.name,
            table.features,
            table.num_embeddings,
            samples=1000,
            rows=ids,
            accesses=counts,
        )


def _context(topology: TopologySpec) -> PlanContext:
    return PlanContext(
        world_size=topology.world_size,
        ranks_per_node=topology.ranks_per_node,
        batch_size=64,
        optimizer="sgd",
        device_type=topology.device,
        rates=topology.collective_rates,
        data=SkewedData(),
    )


class TablePartContract(PluginContract):
    """Tests for both sharding and cache plugins. Subclasses override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Return test tables. All except the last one are assigned to the plugin."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
            Table("t_other", ("other",), 200, 16, pooled=True),
        )

    @pytest.fixture
    def context(self) -> PlanContext:
        """Return planning inputs for one rank, with the access statistics of ``SkewedData``."""
        return _context(this_machine(1))

    @pytest.fixture
    def strategy(
        self, plugin: Sharding | Cache, tables: Sequence[Table], context: PlanContext
    ) -> TableStrategy | None:
        strategy = plugin.strategy(tables[:-1], context)
        assert strategy is None or isinstance(strategy, TableStrategy)
        return strategy

    def test_constrains_only_the_tables_it_is_given(
        self, plugin: Sharding | Cache, tables: Sequence[Table], strategy: TableStrategy | None
    ) -> None:
        own = {table.name for table in tables[:-1]}
        own_constraints = {} if strategy is None else strategy.constraints(tables)
        for constraints in (plugin.constraints(tables[:-1]), own_constraints):
            assert set(constraints) <= own
            assert all(isinstance(value, ParameterConstraints) for value in constraints.values())
        if strategy is not None:
            second = strategy.constraints(tables[:-1])
            for name, first in plugin.constraints(tables[:-1]).items():
                both = {*set_fields(first)} & {*set_fields(second.get(name, first))}
                assert all(
                    getattr(first, field) == getattr(second.get(name, first), field)
                    for field in both
                ), name

    def test_does_nothing_without_tables(
        self, plugin: Sharding | Cache, context: PlanContext
    ) -> None:
        assert dict(plugin.constraints([])) == {}
        assert plugin.strategy([], context) is None

    def test_says_nothing_of_other_tables(
        self, tables: Sequence[Table], strategy: TableStrategy | None
    ) -> None:
        if strategy is None:
            return
        assert _of_table(strategy, tables[-1]) == _of_table(TableStrategy(), tables[-1])
        if (kernels := type(strategy).kernels([strategy])) is not None:
            own = {table.name for table in tables[:-1]}
            assert set(kernels.tables) <= own, "it looks up tables of other plugins"

    def test_every_rank_makes_the_same_strategy(
        self, plugin: Sharding | Cache, tables: Sequence[Table], context: PlanContext
    ) -> None:
        first, second = (_description(copy(plugin), tables, context) for _ in range(2))
        assert first == second

    def test_another_process_makes_the_same_strategy(
        self, plugin: Sharding | Cache, tables: Sequence[Table], context: PlanContext
    ) -> None:
        """Plans must not depend on the order of sets, which differs between processes."""
        (there,) = launch(_described_on_rank, 1, plugin, tables, context)
        assert there == _description(plugin, tables, context)

    def test_its_strategy_is_picklable(
        self, tables: Sequence[Table], context: PlanContext, strategy: TableStrategy | None
    ) -> None:
        """Dataset wrappers may send the TableStrategy to reader processes."""
        if strategy is not None:
            again = pickle.loads(pickle.dumps(strategy))
            expected = _strategy_description(strategy, tables, context)
            assert _strategy_description(again, tables, context) == expected


def _described_on_rank(
    _rank: int,
    _world_size: int,
    plugin: Sharding | Cache,
    tables: Sequence[Table],
    context: PlanContext,
) -> object:
    return _description(plugin, tables, context)


def _description(plugin: Sharding | Cache, tables: Sequence[Table], context: PlanContext) -> object:
    """Return the results of a plugin and its TableStrategy for all tables except the last."""
    constraints = _comparable(plugin.constraints(tables[:-1]))
    strategy = plugin.strategy(tables[:-1], context)
    if strategy is None:
        return constraints
    return constraints, _strategy_description(strategy, tables[:-1], context)


def _strategy_description(
    strategy: TableStrategy, tables: Sequence[Table], context: PlanContext
) -> dict[str, Any]:
    kernels = type(strategy).kernels([strategy])
    return {
        "tables": [_of_table(strategy, table) for table in tables],
        "constraints": _comparable(strategy.constraints(tables)),
        "kernels": kernels and (kernels.compute_kernel, sorted(kernels.tables)),
        "memory_of_rank": dict(strategy.memory_of_rank(context.ranks_per_node, context.optimizer)),
    }


def _comparable(constraints: Mapping[str, ParameterConstraints]) -> dict[str, object]:
    """Return constraints that support ``==``: cache statistics are replaced by numbers."""
    figures: dict[str, object] = {}
    for name, value in constraints.items():
        if (cache := value.cache_params) is None or (stats := cache.stats) is None:
            figures[name] = value
            continue
        without = replace(value, cache_params=replace(cache, stats=None))
        misses = [stats.expected_miss_rate(share) for share in (0.1, 0.5)]
        figures[name] = without, stats.expected_lookups, stats.cacheability, misses
    return figures


def _of_table(strategy: TableStrategy, table: Table) -> dict[str, Any]:
    return {
        "share": strategy.sharded_share(table.name),
        "bandwidth": strategy.fetch_bandwidth(table.name),
        "activations": strategy.activation_bytes(table, 100.0),
        "collectives": strategy.collectives([table.name]),
        "figures": dict(strategy.figures(table.name)),
        "describe": list(strategy.describe(table.name)),
        "needs_stock_kernels": strategy.needs_stock_kernels().get(table.name),
    }


class ShardingContract(TablePartContract):
    """Test suite for a sharding plugin. Subclasses override the fixture ``plugin``."""

    @pytest.fixture
    def context(self) -> PlanContext:
        """Return planning inputs for two nodes of two ranks, with ``SkewedData``."""
        return _context(this_machine(2, nodes=2))

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Return test tables. All except the last one are assigned to the plugin."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_item", ("item", "item_seen"), 64, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
            Table("t_other", ("other",), 200, 16, pooled=True),
        )

    @pytest.fixture
    def model(self, tables: Sequence[Table]) -> nn.Module:
        model = nn.ModuleDict()
        kinds: list[tuple[bool, Any, Any]] = [
            (True, EmbeddingBagCollection, EmbeddingBagConfig),
            (False, EmbeddingCollection, EmbeddingConfig),
        ]
        for pooled, collection, config in kinds:
            configs = [
                config(
                    name=table.name,
                    feature_names=list(table.features),
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                )
                for table in tables
                if table.pooled == pooled
            ]
            if configs:
                kind = "pooled" if pooled else "sequence"
                model[kind] = collection(device=torch.device("cpu"), tables=configs)
        return model

    def test_rewrite_keeps_all_weights(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], context: PlanContext
    ) -> None:
        """``rewrite`` must keep the names of weights, because checkpoints use them."""
        before = _weights(model)
        rewritten = plugin.rewrite(model, tables[:-1], context)
        assert isinstance(rewritten, nn.Module)
        after = _weights(rewritten)
        assert not before.keys() - after.keys(), "the state dict lacks names of the model"
        _assert_equal({name: after[name] for name in before}, before)

    def test_rewrites_a_model_without_values(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], context: PlanContext
    ) -> None:
        """``rewrite`` must support models on the meta device, which the planner uses."""
        meta = deepcopy(model).to("meta")
        found, expected = (
            {name: value.shape for name, value in each.state_dict().items()}
            for each in (
                copy(plugin).rewrite(meta, tables[:-1], context),
                plugin.rewrite(model, tables[:-1], context),
            )
        )
        assert found == expected

    def test_rewrite_without_tables_changes_nothing(
        self, plugin: Sharding, model: nn.Module, context: PlanContext
    ) -> None:
        before = _weights(model)
        _assert_equal(_weights(plugin.rewrite(model, [], context)), before)

    def test_every_rank_comes_to_the_same(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], context: PlanContext
    ) -> None:
        first, second = (
            _weights(copy(plugin).rewrite(deepcopy(model), tables[:-1], context)) for _ in range(2)
        )
        _assert_equal(first, second)

    def test_what_it_offers_are_options(
        self, plugin: Sharding, tables: Sequence[Table], context: PlanContext
    ) -> None:
        """``offers`` must return valid options, from which each candidate plan can be made."""
        for pooled in (True, False):
            alike = [table for table in tables[:-1] if table.pooled == pooled]
            offers = [dict(options) for options in plugin.offers(alike, context)]
            assert [dict(options) for options in plugin.offers(alike, context)] == offers
            assert json.loads(json.dumps(offers)) == offers, "values of a registry file"
            for options in offers:
                offered = type(plugin)(type(plugin).Options.model_validate(options))
                assert set(offered.constraints(alike)) <= {table.name for table in alike}
                offered.strategy(alike, context)

    def test_sharders_shard_modules(self, plugin: Sharding) -> None:
        sharders = plugin.sharders(SharderArguments({}, (), frozenset()))
        assert all(isinstance(sharder, ModuleSharder) for sharder in sharders)
        types = [sharder.module_type for sharder in sharders]
        assert len(types) == len(set(types)), "two sharders for one type of module"


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_equal(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


class CacheContract(TablePartContract):
    """Test suite for a cache plugin. Subclasses override the fixture ``plugin``."""

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_check_returns_or_raises_setup_error(self, plugin: Cache, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        with contextlib.suppress(SetupError):
            plugin.check(torch.device(device))

"""The contract of sharding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.interfaces import PlanContext, SharderArguments, Sharding, Table
from recd_plugins.planning.topologies import this_machine
from recd_plugins.testing.contracts.skewed_data import SkewedData
from recd_plugins.testing.contracts.table_part import TablePartContract


class ShardingContract(TablePartContract):
    """Tests of a sharding plugin: override the fixture ``plugin``."""

    @pytest.fixture
    def setting(self) -> PlanContext:
        """Two nodes of two ranks, whose data is ``SkewedData``."""
        topology = this_machine(2, nodes=2)
        return PlanContext(
            world_size=topology.world_size,
            ranks_per_node=topology.ranks_per_node,
            batch_size=64,
            optimizer="sgd",
            device_type=topology.device,
            rates=topology.collective_rates,
            data=SkewedData(),
        )

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Tables that the plugin takes; the last stays with the planner."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_item", ("item", "item_seen"), 64, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
            Table("t_other", ("other",), 200, 16, pooled=True),
        )

    @pytest.fixture
    def model(self, tables: Sequence[Table]) -> nn.Module:
        """A model that holds ``tables``."""
        model = nn.ModuleDict()
        if any(table.pooled for table in tables):
            model["pooled"] = EmbeddingBagCollection(
                device=torch.device("cpu"),
                tables=[
                    EmbeddingBagConfig(
                        name=table.name,
                        feature_names=list(table.features),
                        num_embeddings=table.num_embeddings,
                        embedding_dim=table.embedding_dim,
                    )
                    for table in tables
                    if table.pooled
                ],
            )
        if any(not table.pooled for table in tables):
            model["sequence"] = EmbeddingCollection(
                device=torch.device("cpu"),
                tables=[
                    EmbeddingConfig(
                        name=table.name,
                        feature_names=list(table.features),
                        num_embeddings=table.num_embeddings,
                        embedding_dim=table.embedding_dim,
                    )
                    for table in tables
                    if not table.pooled
                ],
            )
        return model

    def test_rewrite_leaves_other_tables_alone(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        before = _weights(model)
        rewritten = plugin.rewrite(model, tables[:-1], setting)
        assert isinstance(rewritten, nn.Module)
        other = {
            name: value for name, value in _weights(rewritten).items() if tables[-1].name in name
        }
        assert other, f"{tables[-1].name} is gone"
        _assert_equal(other, {name: before[name] for name in other})

    def test_rewrite_keeps_what_its_tables_hold(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        """By the names that they had: checkpoints know them by these."""
        before = _weights(model)
        after = _weights(plugin.rewrite(model, tables[:-1], setting))
        assert not before.keys() - after.keys(), "the state dict has other names"
        _assert_equal({name: after[name] for name in before}, before)

    def test_rewrites_a_model_without_values(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        """A plan has one on the meta device."""
        meta = deepcopy(model).to("meta")
        found, expected = (
            {name: value.shape for name, value in each.state_dict().items()}
            for each in (
                copy(plugin).rewrite(meta, tables[:-1], setting),
                plugin.rewrite(model, tables[:-1], setting),
            )
        )
        assert found == expected

    def test_rewrite_without_tables_changes_nothing(
        self, plugin: Sharding, model: nn.Module, setting: PlanContext
    ) -> None:
        before = _weights(model)
        _assert_equal(_weights(plugin.rewrite(model, [], setting)), before)

    def test_every_rank_comes_to_the_same(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        ranks = []
        for rank in (copy(plugin), copy(plugin)):  # made anew from its options, as on each rank
            weights = _weights(rank.rewrite(deepcopy(model), tables[:-1], setting))
            ranks.append((weights, dict(rank.constraints(tables[:-1]))))
        (first, *others), (second, *other_others) = ranks
        _assert_equal(first, second)
        assert others == other_others

    def test_what_it_offers_are_options(
        self, plugin: Sharding, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        """A chooser makes, prepares and plans each offer, on every rank by itself."""
        for pooled in (True, False):
            alike = [table for table in tables[:-1] if table.pooled == pooled]
            offers = [dict(options) for options in plugin.offers(alike, setting)]
            assert [dict(options) for options in plugin.offers(alike, setting)] == offers
            assert json.loads(json.dumps(offers)) == offers, "values of a registry file"
            for options in offers:
                offered = type(plugin)(type(plugin).Options.model_validate(options))
                assert set(offered.constraints(alike)) <= {table.name for table in alike}
                offered.part(alike, setting)

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

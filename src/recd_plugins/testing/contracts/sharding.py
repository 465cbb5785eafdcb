"""The contract of sharding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.interfaces import Sharding, Table
from recd_plugins.testing.contracts.plugin import PluginContract


class ShardingContract(PluginContract):
    """Tests of a sharding plugin: override the fixture ``plugin``."""

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
        return nn.ModuleDict(
            {
                "pooled": EmbeddingBagCollection(
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
                ),
                "sequence": EmbeddingCollection(
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
                ),
            }
        )

    def test_constrains_only_the_tables_it_is_given(
        self, plugin: Sharding, tables: Sequence[Table]
    ) -> None:
        constraints = plugin.constraints(tables[:-1])
        assert set(constraints) <= {table.name for table in tables[:-1]}
        assert all(isinstance(value, ParameterConstraints) for value in constraints.values())

    def test_constrains_nothing_without_tables(self, plugin: Sharding) -> None:
        assert dict(plugin.constraints([])) == {}

    def test_rewrite_leaves_other_tables_alone(
        self, plugin: Sharding, model: nn.Module, tables: Sequence[Table]
    ) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rewritten = plugin.rewrite(model, tables[:-1])
        assert isinstance(rewritten, nn.Module)
        other = {
            name: value for name, value in rewritten.state_dict().items() if tables[-1].name in name
        }
        assert other, f"{tables[-1].name} is gone"
        for name, value in other.items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)

    def test_rewrite_without_tables_changes_nothing(
        self, plugin: Sharding, model: nn.Module
    ) -> None:
        before = list(model.state_dict())
        assert list(plugin.rewrite(model, []).state_dict()) == before

    def test_sharders_shard_modules(self, plugin: Sharding) -> None:
        sharders = plugin.sharders({})
        assert all(isinstance(sharder, ModuleSharder) for sharder in sharders)
        types = [sharder.module_type for sharder in sharders]
        assert len(types) == len(set(types)), "two sharders for one type of module"

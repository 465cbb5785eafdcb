"""Models of one's own, whose tables share what those of recd run have for themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recd_plugin_tuning.auto import Chosen
from recd_plugins import prepare
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.setting import setting_of
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import RegistryError

KJT = {"use": "recd.kjt"}


def test_what_tables_of_one_feature_cannot_have_is_not_chosen(make_registry) -> None:
    hashed = {"use": "recd.sigrid_hash", "features": ["*"], "options": {"buckets": 50}}
    sections = {"pooling": [], "preprocessing": [hashed], "converter": KJT}
    registry = make_registry(sharding=[{"use": "auto"}], **sections)
    tables = [
        EmbeddingConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=["seq_0_0"])
        for name, rows in (("t_big", 1_000_000), ("t_small", 50))
    ]
    model = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    spec = load_topology("machine", nodes=2, ranks=2)
    slow = spec.model_copy(update={"inter_node_bandwidth": 6.25e6, "flops": 2e10})
    prepared = prepare(registry, model, setting_of(registry, list(embedding_modules(model)), slow))
    assert type(prepared.model) is EmbeddingCollection, "without tiers"
    assert prepared.coalesced == {"t_big", "t_small"}
    assert isinstance(prepared.chosen, Chosen)
    refused = [why for group in prepared.chosen.groups for _, why in group.refused]
    assert any("feature seq_0_0 looks up tables t_big and t_small" in why for why in refused)


def test_tables_of_one_name_are_left_to_other_entries(make_registry) -> None:
    def prepared(*entries: dict[str, Any]) -> Prepared:
        registry = make_registry(sharding=[*entries], pooling=[], converter=KJT)
        named = {"seq_0_0": "t_item", "seq_0_1": "t_item", "seq_0_2": "t_alone"}
        tables = {
            feature: EmbeddingConfig(
                name=name, embedding_dim=16, num_embeddings=1000, feature_names=[feature]
            )
            for feature, name in named.items()
        }
        modules = {name: EmbeddingCollection(tables=[table]) for name, table in tables.items()}
        return prepare(registry, nn.ModuleDict(modules))

    said = r"sharding\[0\]: several modules have tables named t_item"
    with pytest.raises(RegistryError, match=said):
        prepared({"use": "auto"})
    found = prepared({"use": "auto"}, {"use": "torchrec.row_wise", "tables": ["t_item"]})
    assert isinstance(found.chosen, Chosen)
    assert [group.tables for group in found.chosen.groups] == [("t_alone",)]


def test_tables_that_torchrecs_own_sharders_take_are_planned_beside_others(make_registry) -> None:
    registry = make_registry(sharding=[{"use": "auto"}], pooling=[], converter=KJT)
    own = EmbeddingConfig(
        name="t_own", embedding_dim=16, num_embeddings=1000, feature_names=["seq_0_0"]
    )
    left = EmbeddingBagConfig(
        name="t_left", embedding_dim=16, num_embeddings=1000, feature_names=["usr_0"]
    )
    bags = EmbeddingBagCollection(tables=[left], is_weighted=True)
    weights = PositionWeightedModuleCollection({"usr_0": 8})
    model = nn.ModuleDict(
        {
            "own": EmbeddingCollection(tables=[own]),
            "left": FeatureProcessedEmbeddingBagCollection(bags, weights),
        }
    )
    found = prepare(registry, model).chosen
    assert isinstance(found, Chosen)
    assert [group.tables for group in found.groups] == [("t_own",)]

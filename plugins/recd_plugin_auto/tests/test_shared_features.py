"""Tables of one feature: what is chosen for them can be sharded."""

from __future__ import annotations

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugin_auto.chosen import Chosen
from recd_plugins.planning.setting import setting_of
from recd_plugins.planning.topologies import load_topology


def test_what_tables_of_one_feature_cannot_have_is_not_chosen(make_registry) -> None:
    hashed = {"use": "recd.sigrid_hash", "features": ["*"], "options": {"buckets": 50}}
    sections = {"pooling": [], "preprocessing": [hashed], "converter": {"use": "recd.kjt"}}
    registry = make_registry(sharding=[{"use": "auto"}], **sections)
    tables = [
        EmbeddingConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=["seq_0_0"])
        for name, rows in (("t_big", 1_000_000), ("t_small", 50))
    ]
    model = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    spec = load_topology("machine", nodes=2, ranks=2)
    slow = spec.model_copy(update={"inter_node_bandwidth": 6.25e6, "flops": 2e10})
    prepared = registry.prepare(model, setting_of(registry, model, slow))
    assert type(prepared.model) is EmbeddingCollection, "without tiers"
    assert prepared.coalesced == {"t_big", "t_small"}
    assert isinstance(prepared.chosen, Chosen)
    refused = [why for group in prepared.chosen.groups for _, why in group.refused]
    assert any("feature seq_0_0 looks up tables t_big and t_small, one of" in why for why in refused)

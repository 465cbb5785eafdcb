"""`auto` with shardings of third parties, and for models of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from tests import sharded
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recd_plugin_tuning.tests.auto_cases import AUTO, NO_COMPUTE, chosen_of, slow
from recd_plugins import RunConfig, load_registry, prepare
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.planning.plan_context import plan_context
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.study import with_plugins
from recd_plugins.runtime.errors import NoPlanError, RegistryError

ACME = """
from collections.abc import Sequence
from pydantic import Field
from recd_plugins.api import PluginOptions, Sharding, TableStrategy, hookimpl

class Near(TableStrategy):
    def __init__(self, share, keeps): self.share, self.keeps = share, keeps
    def sharded_share(self, table): return self.share
    def memory_of_rank(self, ranks_per_node, optimizer): return {"copies": 2**20}
    def activation_bytes(self, table, ids): return self.keeps

class Nearer(Sharding):
    "All but a share of ids are somehow there already."
    name = "acme.nearer"
    class Options(PluginOptions):
        share: float = Field(default=1.0, ge=0, le=1)
        keeps: float = 0.0
    @classmethod
    def offers(cls, tables, context):
        return [] if tables[0].pooled else OFFERS
    def strategy(self, tables, context):
        return Near(self.options.share, self.options.keeps)

@hookimpl
def register_shardings():
    return [Nearer]
"""


def with_acme(make_registry: Any, tmp_path: Path, offers: str, **sections: Any) -> RunConfig:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "acme_nearer.py").write_text(f"{ACME}\nOFFERS = {offers}\n")
    path = make_registry(sharding=AUTO, **sections).path
    return load_registry(path, plugins_dir=folder)


def test_a_third_party_takes_part(make_registry, tmp_path: Path) -> None:
    registry = with_acme(make_registry, tmp_path, "[{}, {'share': 0.0}, {'share': 0.1}]")
    found = chosen_of(with_plugins(registry, slow()).prepared)
    for each in found.groups:
        if not each.pooled:
            assert str(each.offer) == "acme.nearer {share: 0.0}"
            assert any("share: 0.1" in str(offer) for offer, _ in each.others)


def test_what_a_forward_pass_keeps_is_counted_before_it_chooses(
    make_registry, tmp_path: Path
) -> None:
    offers, large = "[{'share': 0.0, 'keeps': 1e15}, {'share': 0.01}]", {"num_embeddings": 50_000}
    registry = with_acme(make_registry, tmp_path, offers, model=large)
    auto = with_plugins(registry, slow())
    assert "acme.nearer {share: 0.01}" in {str(g.offer) for g in chosen_of(auto.prepared).groups}
    alone = [{"use": "acme.nearer", "tables": ["t_seq_*"], "options": {"keeps": 1e15}}]
    document = YAML(typ="safe").load(registry.path.read_text()) | {"sharding": alone}
    registry.path.write_text(json.dumps(document))
    by_hand = with_plugins(load_registry(registry.path, plugins_dir=tmp_path / "plugins"), slow())
    kept = by_hand.activation_bytes(NO_COMPUTE, 256)
    with pytest.raises(NoPlanError, match=r"activations and other data .*iB per rank"):
        by_hand.plan(slow().to_torchrec(), 256, kept)


KJT = {"use": "recd.kjt"}


def config(name: str, feature: str, rows: int = 1000) -> EmbeddingConfig:
    sizes = {"embedding_dim": 16, "num_embeddings": rows}
    return EmbeddingConfig(name=name, feature_names=[feature], **sizes)


def test_what_tables_of_one_feature_cannot_have_is_not_chosen(make_registry) -> None:
    hashed = {"use": "recd.sigrid_hash", "features": ["*"], "options": {"buckets": 50}}
    sections = {"pooling": [], "preprocessing": [hashed], "converter": KJT}
    registry = make_registry(sharding=AUTO, **sections)
    tables = [config("t_big", "seq_0_0", 1_000_000), config("t_small", "seq_0_0", 50)]
    model = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    context = plan_context(registry, list(embedding_modules(model)), slow())
    prepared = prepare(registry, model, context)
    assert type(prepared.model) is EmbeddingCollection, "without tiers"
    assert prepared.coalesced == {"t_big", "t_small"}
    refused = [why for group in chosen_of(prepared).groups for _, why in group.refused]
    assert any("seq_0_0" in why and "t_big" in why for why in refused)


def test_tables_of_one_name_are_left_to_other_entries(make_registry) -> None:
    def prepared(*entries: dict[str, Any]) -> Prepared:
        registry = make_registry(sharding=[*entries], pooling=[], converter=KJT)
        named = {"seq_0_0": "t_item", "seq_0_1": "t_item", "seq_0_2": "t_alone"}
        tables = {feature: config(name, feature) for feature, name in named.items()}
        modules = {name: EmbeddingCollection(tables=[table]) for name, table in tables.items()}
        return prepare(registry, nn.ModuleDict(modules))

    said = r"sharding\[0\]: several modules have tables with the same name: 't_item'"
    with pytest.raises(RegistryError, match=said):
        prepared({"use": "auto"})
    found = prepared({"use": "auto"}, {"use": "torchrec.row_wise", "tables": ["t_item"]})
    assert [group.tables for group in chosen_of(found).groups] == [("t_alone",)]


def test_tables_that_torchrecs_own_sharders_take_are_planned_beside_others(make_registry) -> None:
    registry = make_registry(sharding=AUTO, pooling=[], converter=KJT)
    bags = sharded.bags("usr_0", rows=1000, dim=16, weighted=True)
    weights = PositionWeightedModuleCollection({"usr_0": 8})
    own = EmbeddingCollection(tables=[config("t_own", "seq_0_0")])
    left_alone = FeatureProcessedEmbeddingBagCollection(bags, weights)
    model = nn.ModuleDict({"own": own, "left": left_alone})
    found = chosen_of(prepare(registry, model))
    assert [group.tables for group in found.groups] == [("t_own",)]

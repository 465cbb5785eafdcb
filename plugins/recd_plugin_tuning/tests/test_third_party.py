"""What a third party's sharding offers to ``auto``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from recd_plugin_tuning.tests.auto_cases import AUTO, NO_COMPUTE, chosen_of, slow
from recd_plugins import RunConfig, load_registry
from recd_plugins.planning.study import with_plugins
from recd_plugins.runtime.errors import NoPlanError

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
    def offers(cls, tables, setting):
        return [] if tables[0].pooled else OFFERS
    def part(self, tables, setting):
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
    with pytest.raises(NoPlanError, match=r"reserve of 15%, .*iB of activations;"):
        by_hand.plan(slow().to_torchrec(), 256, kept)

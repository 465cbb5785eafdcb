"""Weights of sharded modules, set from whole tables."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins.runtime.errors import RecdError
from recd_plugins.training import checkpoint_dcp
from recd_plugins.training.rank_state import copy_weights


def test_a_collision_map_keeps_the_segments_of_its_shards() -> None:
    name = "maps.t._output_segments_tensor"
    sharded = {name: torch.tensor([0, 2, 4]), "over.weight": torch.zeros(2)}
    copy_weights(sharded, {name: torch.tensor([0, 4, -1]), "over.weight": torch.ones(2)})
    assert sharded[name].tolist() == [0, 2, 4]
    assert sharded["over.weight"].tolist() == [1, 1]


def test_what_a_sharding_keeps_beside_its_tables_is_no_weight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=3, feature_names=["f"])
    model = nn.ModuleDict({"bags": EmbeddingBagCollection([config]), "top": nn.Linear(4, 1)})
    kept = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    kept["bags.reads"] = torch.arange(3)
    monkeypatch.setattr(checkpoint_dcp, "read_weights", lambda *_, **__: kept)
    checkpoint_dcp.load_weights(tmp_path, model)
    assert all(bool((value == 1).all()) for value in model.state_dict().values())
    kept["top.scale"] = torch.ones(1)
    with pytest.raises(RecdError, match=r"top\.scale is there, and the model .* no such parameter"):
        checkpoint_dcp.load_weights(tmp_path, model)

"""Which rows are in which tier, and what the unsharded collection knows of it."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import RowTiers, TieredEmbeddingCollection
from recd_plugins.runtime.errors import SetupError


def collection() -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=9, feature_names=[name])
            for name in ("t", "u")
        ],
        need_indices=True,
    )


def test_it_is_the_collection_it_replaces() -> None:
    plain = collection()
    tiered = TieredEmbeddingCollection(plain, {"u": RowTiers([1]), "t": RowTiers([8], [2, 3])})
    assert tiered.state_dict().keys() == plain.state_dict().keys()
    for name, parameter in tiered.named_parameters():
        assert parameter is plain.get_parameter(name)
    features = KeyedJaggedTensor(["t", "u"], torch.tensor([8, 1, 2]), lengths=torch.tensor([2, 1]))
    for name, expected in plain(features).items():
        output = tiered(features)[name]
        assert torch.equal(output.values(), expected.values())
        assert torch.equal(output.weights(), expected.weights())
    assert list(tiered.tiers) == ["t", "u"]


def test_overlay_bytes() -> None:
    tiered = TieredEmbeddingCollection(
        collection(), {"t": RowTiers([8], [2, 3]), "u": RowTiers([1], [5])}
    )
    # Two hot rows, and two of three flex rows; all five are known, and found by a key and a place.
    assert tiered.overlay_bytes(2, "sgd") == 4 * (4 * 4 + 8) + 5 * 24
    assert tiered.overlay_bytes(2, "rowwise_adagrad") == 4 * (5 * 4 + 8) + 5 * 24
    assert tiered.overlay_bytes(1, "sgd") == 5 * (4 * 4 + 8) + 5 * 24


@pytest.mark.parametrize(("hot", "flex"), [([3, 1, 3], []), ([3], [1, 3]), ([], [2, -1])])
def test_rows_that_are_no_tiers(hot: list[int], flex: list[int]) -> None:
    with pytest.raises(SetupError, match="negative, or in the tiers twice"):
        RowTiers(hot, flex)

"""The two architectures are TorchRec's DLRM and DLRM_DCN, whose weights they take and draw."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM as TorchRecDLRM
from torchrec.models.dlrm import (
    DLRM_DCN,
    DenseArch,
    InteractionArch,
    InteractionDCNArch,
    OverArch,
)
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import load_registry
from recd_plugins.config import ModelSpec
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.model.dlrm import DLRM, CrossInteraction, DotInteraction, interaction_of
from recd_plugins.runtime.errors import RegistryError

FEATURES, NUM_DENSE, ROWS, DIM = ("a", "b", "c"), 5, 11, 8


def spec_of(**fields: Any) -> ModelSpec:
    sizes = {"embedding_dim": DIM, "num_embeddings": ROWS, "bottom_mlp": [12], "top_mlp": [9, 7]}
    return ModelSpec.model_validate({**sizes, **fields})


def tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in FEATURES
        ]
    )


def batch(rows: int = 6) -> ModelInput:
    lengths = torch.randint(0, 4, (len(FEATURES) * rows,))
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    kjt = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)
    labels = torch.randint(0, 2, (rows,)).float()
    return ModelInput(
        dense_features=torch.randn(rows, NUM_DENSE), labels=labels, sparse_features=kjt
    )


def put_weights(model: DLRM, theirs: nn.Module) -> None:
    """TorchRec's names are other ones: theirs are the model's modules at other places."""
    places = {
        "bags.": "sparse_arch.embedding_bag_collection.",
        "top.dense_arch.": "dense_arch.",
        "top.interaction.": "inter_arch.",
        "top.over_arch.": "over_arch.",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        (place,) = (place for place in places if name.startswith(place))
        weights[places[place] + name.removeprefix(place)] = tensor
    theirs.load_state_dict(weights)  # strict


def torchrecs(architecture: str) -> nn.Module:
    if architecture == "dlrm":
        return TorchRecDLRM(tables(), NUM_DENSE, [12, DIM], [9, 7, 1])
    return DLRM_DCN(tables(), NUM_DENSE, [12, DIM], [9, 7, 1], dcn_num_layers=2, dcn_low_rank_dim=3)


def gradients(model: nn.Module) -> list[Tensor]:
    """Of the parameters, by their sizes and values: names and order are not compared."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return sorted(found, key=lambda grad: (tuple(grad.shape), float(grad.double().norm())))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("dlrm", {}), ("dcn", {"cross_layers": 2, "low_rank_dim": 3})],
)
def test_outputs_and_gradients_are_those_of_torchrecs_model(
    architecture: str, options: dict[str, int]
) -> None:
    torch.manual_seed(3)
    model = DLRM(spec_of(architecture=architecture, **options), NUM_DENSE, Placement(FEATURES))
    theirs = torchrecs(architecture)
    put_weights(model, theirs)
    data = batch()
    loss, (_, logits, _) = model(data)
    expected = theirs(data.dense_features, data.sparse_features).squeeze(1)
    torch.testing.assert_close(logits, expected)
    loss.backward()
    nn.functional.binary_cross_entropy_with_logits(expected, data.labels).backward()
    ours, reference = gradients(model), gradients(theirs)
    assert len(ours) == len(reference) == len(list(model.parameters()))
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other)


def test_a_dlrm_draws_its_weights_as_ever() -> None:
    """Tables, bottom MLP, top MLP: the interaction draws nothing."""
    torch.manual_seed(5)
    model = DLRM(spec_of(), NUM_DENSE, Placement(FEATURES))
    torch.manual_seed(5)
    bags, bottom = tables(), DenseArch(NUM_DENSE, [12, DIM])
    top = OverArch(DIM + 6, [9, 7, 1])
    drawn = itertools.chain(bags.parameters(), bottom.parameters(), top.parameters())
    for ours, expected in zip(model.parameters(), drawn, strict=True):
        assert torch.equal(ours, expected)


def test_names_of_a_dlrms_weights_are_as_ever() -> None:
    """Checkpoints have them."""
    names = list(DLRM(spec_of(bottom_mlp=[12]), NUM_DENSE, Placement(FEATURES)).state_dict())
    assert {name.rpartition(".")[0] for name in names if "bags" not in name} == {
        "top.dense_arch.model._mlp.0._linear",
        "top.dense_arch.model._mlp.1._linear",
        "top.over_arch.model.0._mlp.0._linear",
        "top.over_arch.model.0._mlp.1._linear",
        "top.over_arch.model.1",
    }


@settings(max_examples=20, deadline=None)
@given(
    num_sparse=st.integers(1, 6),
    rows=st.integers(1, 5),
    cross_net=st.sampled_from(["dot", "low_rank", "full", "vector"]),
    layers=st.integers(1, 3),
)
def test_an_interaction_is_torchrecs(
    num_sparse: int, rows: int, cross_net: str, layers: int
) -> None:
    spec = (
        spec_of()
        if cross_net == "dot"
        else spec_of(architecture="dcn", cross_net=cross_net, cross_layers=layers)
    )
    ours = interaction_of(spec, num_sparse + 1)
    dense, sparse = torch.randn(rows, DIM), torch.randn(rows, num_sparse, DIM)
    theirs: nn.Module
    if isinstance(ours, CrossInteraction):
        theirs = InteractionDCNArch(num_sparse, ours.crossnet)
    else:
        theirs = InteractionArch(num_sparse)
    found = ours(dense, torch.cat([dense.unsqueeze(1), sparse], dim=1))
    assert found.shape == (rows, ours.out_features)
    torch.testing.assert_close(found, theirs(dense, sparse))


def test_options_choose_the_cross_network() -> None:
    nets: dict[str, nn.Module] = {}
    for name in ("low_rank", "full", "vector"):
        spec = spec_of(architecture="dcn", cross_net=name, cross_layers=2)
        interaction = interaction_of(spec, 4)
        assert isinstance(interaction, CrossInteraction)
        nets[name] = interaction.crossnet
    assert [type(net) for net in nets.values()] == [LowRankCrossNet, CrossNet, VectorCrossNet]
    width = 4 * DIM
    assert {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()} == {
        "low_rank": 2 * (2 * width * (width // 4) + width),
        "full": 2 * (width * width + width),
        "vector": 2 * (width + width),
    }
    thin = interaction_of(spec_of(architecture="dcn", cross_layers=1, low_rank_dim=5), 4)
    assert [tuple(p.shape) for p in thin.parameters()] == [(width, 5), (5, width), (width,)]
    assert isinstance(interaction_of(spec_of(), 4), DotInteraction)


REGISTRY = """\
version: 1
dataset: {use: recd.interactions, options: {path: table.inter}}
converter: {use: recd.kjt}
model:
"""


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"cross_layers": 2}, ":5 model.cross_layers: is an option of architecture dcn, and this"),
        ({"cross_net": "full"}, ":5 model.cross_net: is an option of architecture dcn"),
        ({"low_rank_dim": 2}, ":5 model.low_rank_dim: is an option of architecture dcn"),
        (
            {"architecture": "dcn", "cross_net": "full", "low_rank_dim": 2},
            ":7 model.low_rank_dim: is an option of cross_net low_rank, and this model's is full",
        ),
        ({"architecture": "dcnv2"}, ":5 model.architecture: "),
        ({"architecture": "dcn", "cross_layers": 0}, ":6 model.cross_layers: "),
    ],
)
def test_what_would_change_nothing_is_refused_with_its_line(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "registry.yaml"
    lines = "".join(f"  {name}: {value}\n" for name, value in fields.items())
    path.write_text(REGISTRY + lines, encoding="utf-8")
    with pytest.raises(RegistryError) as caught:
        load_registry(path)
    (found,) = str(caught.value).splitlines()
    assert problem in found

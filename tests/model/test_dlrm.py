"""The demo model computes what its features say, in whatever order TorchRec returns them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sharded import bags
from tests.small_registry import write_registry
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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugins import RunConfig, load_registry
from recd_plugins.config import ModelSpec
from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.model.build import build_model
from recd_plugins.model.dlrm import DLRM, CrossInteraction, interaction_of
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.runtime.errors import RecdError, RegistryError


def keyed(vectors: dict[str, Tensor], keys: Iterable[str]) -> KeyedTensor:
    return KeyedTensor.from_tensor_list([*keys], [vectors[key] for key in keys])


def test_the_order_of_a_keyed_tensor_does_not_matter() -> None:
    placement = Placement(pooled=("a", "b", "c"))
    model = DLRM(ModelSpec(embedding_dim=4), num_dense=2, placement=placement)
    dense, vectors = torch.randn(5, 2), {name: torch.randn(5, 4) for name in "abc"}
    logits = []
    for order in ("abc", "cab"):
        logits.append(model.top(dense, torch.ones(5), keyed(vectors, order), None, None)[1])
    assert torch.equal(*logits)


def test_the_model_is_the_same_whatever_is_replicated() -> None:
    models = []
    for replicated in ((), ("a", "c"), ("a", "b", "c")):
        torch.manual_seed(0)
        pooled = tuple(name for name in "abc" if name not in replicated)
        placement = Placement(pooled, replicated, ("s",))
        models.append(DLRM(ModelSpec(num_embeddings=9), 2, placement, "abc"))
    whole = {name.split(".")[-2]: tables for name, tables in models[0].state_dict().items()}
    dense, vectors = torch.randn(5, 2), {name: torch.randn(5, 16) for name in "abc"}
    logits = []
    for model in models:
        for name, weights in model.state_dict().items():
            if "t_" in name:
                assert torch.equal(weights, whole[name.split(".")[-2]])
        tensors = [
            keyed(vectors, keys) if keys else None
            for keys in (model.placement.pooled, model.placement.replicated)
        ]
        logits.append(model.top(dense, torch.ones(5), *tensors, torch.ones(5, 1, 16))[1])
    assert all(torch.equal(logits[0], each) for each in logits[1:])


def registry_in(folder: Path, **sections: Any) -> RunConfig:
    return load_registry(write_registry(folder, **sections))


def with_model(folder: Path, *lines: str) -> Path:
    path = write_registry(folder, model=None)
    path.write_text("\n  ".join([f"{path.read_text()}model:", *lines]))
    return path


def test_numbers_alone_have_a_model_without_tables(tmp_path: Path) -> None:
    registry = registry_in(tmp_path)
    with pytest.raises(RecdError, match=r"registry.yaml: the dataset has no features"):
        build_model(registry, FeatureSchema(sparse=(), dense=(), label="label"))
    model = build_model(registry, FeatureSchema(sparse=(), dense=("price",), label="label"))
    assert isinstance(model, DLRM)
    assert not any("t_" in name for name in model.state_dict())
    assert model.top(torch.randn(5, 1), torch.ones(5), None, None, None)[1].shape == (5,)


def test_a_size_or_target_without_a_feature_is_refused_with_its_line(tmp_path: Path) -> None:
    lines = ["tables:", "  t_item: {num_embeddings: 5}", "  t_usr: {num_embeddings: 7}"]
    path = with_model(tmp_path, *lines, "  'ads*': {num_embeddings: 9}")
    pooling = "\npooling: [{use: recd.din, features: [user], options: {target: item.id}}]\n"
    path.write_text(path.read_text() + pooling)
    schema = FeatureSchema(sparse=("user", "item"), dense=(), label="label")
    with pytest.raises(RegistryError) as caught:
        build_model(load_registry(path), schema)
    assert str(caught.value).splitlines() == [
        f"{path}:8 model.tables.t_usr: the pattern matches no table. Did you mean 't_user'?",
        f"{path}:9 model.tables.ads*: the pattern matches no table. Use one of: 't_user', 't_item'",
        f"{path}:10 pooling[0].options.target: no feature is named 'item.id'. Did you mean 'item'?",
    ]
    text = path.read_text().replace("t_usr", "t_us*").replace("ads*", "*")
    path.write_text(text.replace("item.id", "item"))
    assert build_model(load_registry(path), schema).bags is not None


@pytest.mark.parametrize("pool_rows", ["unique", "all"])
@pytest.mark.parametrize("target", ["city", "item", "seller"])
def test_a_target_is_the_models_own_vector_of_the_item(
    tmp_path: Path, target: str, pool_rows: Any
) -> None:
    torch.manual_seed(0)
    placement = Placement(pooled=("city",), replicated=("item",), sequence=("seen", "seller"))
    spec = ModelSpec(embedding_dim=4, num_embeddings=50, pool_rows=pool_rows)
    model = DLRM(spec, num_dense=0, placement=placement)
    din = {"use": "recd.din", "features": ["seen"], "options": {"target": target}}
    pooling = [din, {"use": "recd.mean", "features": ["seller"]}]
    put_poolings(registry_in(tmp_path, pooling=pooling), model)
    kjt = KeyedJaggedTensor(
        keys=["city", "item", "seen", "seller"],
        values=torch.arange(20),
        lengths=torch.tensor([1] * 3 + [1] * 3 + [4, 0, 4] + [2, 2, 2]),
    )
    batch = lower(Batch(torch.zeros(3, 0), torch.zeros(3), kjt), placement)
    before = model(batch)[1][1]
    table = dict(model.named_parameters())[
        {
            "city": "bags.embedding_bags.t_city.weight",
            "item": "replicated_bags.embedding_bags.t_item.weight",
            "seller": "sequences.embeddings.t_seller.weight",
        }[target]
    ]
    pooled: list[torch.Tensor] = []
    model.sequence_pooling.register_forward_hook(lambda _, __, output: pooled.append(output[:, 0]))
    model(batch)
    with torch.no_grad():
        table.add_(torch.randn_like(table))
    model(batch)
    assert not torch.allclose(pooled[0], pooled[1], rtol=1e-6, atol=0)
    assert not pooled[1][1].any()
    assert not torch.equal(before, model(batch)[1][1])


@pytest.mark.parametrize("mean", [0.001, 0.5, 0.9, 0.0, 1.0, None])
@pytest.mark.parametrize("architecture", ["dlrm", "dcn"])
def test_training_starts_at_the_mean_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, mean: float | None
) -> None:
    registry = registry_in(tmp_path, model={"architecture": architecture})
    schema = FeatureSchema(("a", "b"), ("x",), "label")
    torch.manual_seed(0)
    drawn = build_model(registry, schema).state_dict()
    monkeypatch.setattr(type(registry.dataset), "label_mean", lambda _: mean)
    torch.manual_seed(0)
    state = build_model(registry, schema).state_dict()
    differ = [name for name in state if not torch.equal(state[name], drawn[name])]
    if mean in (0.0, 1.0, None):  # no logit, or not known
        assert differ == []
    else:
        (bias,) = differ
        assert torch.sigmoid(state[bias]).item() == pytest.approx(mean)


def test_a_pooling_that_does_not_suit_the_model_is_refused_with_its_line(tmp_path: Path) -> None:
    model = DLRM(ModelSpec(), num_dense=0, placement=Placement(("item",), sequence=("seen",)))
    entry = {"use": "recd.attention", "features": ["seen"], "options": {"heads": 3}}
    message = r"registry\.yaml:6 pooling\[0\]: recd.*: option 'heads' is 3, which does not divide"
    with pytest.raises(RegistryError, match=message):
        put_poolings(registry_in(tmp_path, pooling=[entry]), model)


FEATURES, NUM_DENSE, ROWS, DIM = ("a", "b", "c"), 5, 11, 8
tables = partial(bags, *FEATURES, rows=ROWS, dim=DIM)


def spec_of(**fields: Any) -> ModelSpec:
    sizes = {"embedding_dim": DIM, "num_embeddings": ROWS, "bottom_mlp": [12], "top_mlp": [9, 7]}
    return ModelSpec.model_validate({**sizes, **fields})


def batch(rows: int = 6) -> ModelInput:
    lengths = torch.randint(0, 4, (len(FEATURES) * rows,))
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    kjt = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)
    labels = torch.randint(0, 2, (rows,)).float()
    return ModelInput(
        dense_features=torch.randn(rows, NUM_DENSE), labels=labels, sparse_features=kjt
    )


def put_weights(model: DLRM, theirs: nn.Module) -> None:
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


def test_a_dlrm_draws_and_names_its_weights_as_ever() -> None:
    torch.manual_seed(5)
    model = DLRM(spec_of(), NUM_DENSE, Placement(FEATURES))
    torch.manual_seed(5)
    parts = tables(), DenseArch(NUM_DENSE, [12, DIM]), OverArch(DIM + 6, [9, 7, 1])
    drawn = [parameter for part in parts for parameter in part.parameters()]
    for ours, expected in zip(model.parameters(), drawn, strict=True):
        assert torch.equal(ours, expected)
    assert {name.rpartition(".")[0] for name in model.state_dict() if "bags" not in name} == {
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
    dcn = {"architecture": "dcn", "cross_net": cross_net, "cross_layers": layers}
    spec = spec_of() if cross_net == "dot" else spec_of(**dcn)
    ours = interaction_of(spec, num_sparse + 1)
    kinds = {"low_rank": LowRankCrossNet, "full": CrossNet, "vector": VectorCrossNet}
    assert type(getattr(ours, "crossnet", None)) is kinds.get(cross_net, type(None))
    dense, sparse = torch.randn(rows, DIM), torch.randn(rows, num_sparse, DIM)
    theirs: nn.Module
    if isinstance(ours, CrossInteraction):
        theirs = InteractionDCNArch(num_sparse, ours.crossnet)
    else:
        theirs = InteractionArch(num_sparse)
    found = ours(dense, torch.cat([dense.unsqueeze(1), sparse], dim=1))
    assert found.shape == (rows, ours.out_features)
    torch.testing.assert_close(found, theirs(dense, sparse))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["cross_layers: 2"], "the option applies only to model.architecture: dcn"),
        (["cross_net: full"], "the option applies only to"),
        (["low_rank_dim: 2"], "the option applies only to"),
        (
            ["architecture: dcn", "cross_net: full", "low_rank_dim: 2"],
            "the option applies only to model.cross_net: low_rank",
        ),
        (["architecture: dcnv2"], ""),
        (["architecture: dcn", "cross_layers: 0"], ""),
    ],
)
def test_what_would_change_nothing_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], problem: str
) -> None:
    with pytest.raises(RegistryError) as caught:
        load_registry(with_model(tmp_path, *lines))
    (found,) = str(caught.value).splitlines()
    assert f":{5 + len(lines)} model.{lines[-1].partition(':')[0]}: {problem}" in found

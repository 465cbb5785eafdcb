"""The demo model computes what its features say, in whatever order TorchRec returns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugins import RunConfig, load_registry
from recd_plugins.config import ModelSpec
from recd_plugins.data.lower import lower
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.model.build import build_model
from recd_plugins.model.dlrm import DLRM
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.runtime.errors import RecdError, RegistryError


def test_the_order_of_a_keyed_tensor_does_not_matter() -> None:
    placement = Placement(pooled=("a", "b", "c"))
    model = DLRM(ModelSpec(embedding_dim=4), num_dense=2, placement=placement)
    dense, vectors = torch.randn(5, 2), {name: torch.randn(5, 4) for name in "abc"}
    logits = []
    for order in ("abc", "cab"):
        tensor = KeyedTensor(list(order), [4] * 3, torch.cat([vectors[k] for k in order], dim=1))
        logits.append(model.top(dense, tensor, None, None))
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
            KeyedTensor(list(keys), [16] * len(keys), torch.cat([vectors[k] for k in keys], dim=1))
            if keys
            else None
            for keys in (model.placement.pooled, model.placement.replicated)
        ]
        logits.append(model.top(dense, *tensors, torch.ones(5, 1, 16)))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.fixture
def registry(tmp_path: Path) -> RunConfig:
    path = tmp_path / "registry.yaml"
    path.write_text(
        "version: 1\n"
        "dataset: {use: recd.session_parquet, options: {path: table.parquet}}\n"
        "converter: {use: recd.kjt}\n"
        "model: {embedding_dim: 4}\n"
        "training: {batch_size: 8}\n"
    )
    return load_registry(path)


@pytest.mark.parametrize("form", ["pooled", "replicated", "sequence"])
def test_a_name_that_torch_does_not_take_is_refused(form: str) -> None:
    placement = Placement(**{form: ("user.hist", "item")})
    with pytest.raises(RecdError, match=r"features user\.hist: .* rename the columns, leave them"):
        DLRM(ModelSpec(embedding_dim=4), num_dense=2, placement=placement)


def test_data_without_features_is_refused(registry: RunConfig) -> None:
    with pytest.raises(RecdError, match=r"registry.yaml: the dataset has no feature"):
        build_model(registry, FeatureSchema(sparse=(), dense=(), label="label"))


def test_numbers_alone_have_a_model_without_tables(registry: RunConfig) -> None:
    model = build_model(registry, FeatureSchema(sparse=(), dense=("price",), label="label"))
    assert isinstance(model, DLRM)
    assert not any("t_" in name for name in model.state_dict())
    assert model.top(torch.randn(5, 1), None, None, None).shape == (5,)


def test_a_size_for_no_table_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(
        "version: 1\n"
        "dataset: {use: recd.session_parquet, options: {path: table.parquet}}\n"
        "converter: {use: recd.kjt}\n"
        "model:\n"
        "  tables:\n"
        "    t_item: {num_embeddings: 5}\n"
        "    t_usr: {num_embeddings: 7}\n"
        '    "ads*": {num_embeddings: 9}\n'
    )
    schema = FeatureSchema(sparse=("user", "item"), dense=(), label="label")
    with pytest.raises(RegistryError) as caught:
        build_model(load_registry(path), schema)
    assert str(caught.value).splitlines() == [
        f"{path}:7 model.tables.t_usr: matches no table; did you mean t_user?",
        f"{path}:8 model.tables.ads*: matches no table; the tables: t_user, t_item",
    ]
    path.write_text(path.read_text().replace("t_usr", "t_us*").replace("ads*", "*"))
    assert build_model(load_registry(path), schema).bags is not None


@pytest.mark.parametrize("pool_rows", ["unique", "all"])
@pytest.mark.parametrize("target", ["city", "item", "seller"])
def test_a_target_is_the_models_own_vector_of_the_item(
    registry: RunConfig, target: str, pool_rows: Any
) -> None:
    """Looked up in bags, in replicated bags, and as a sequence of its own."""
    torch.manual_seed(0)
    placement = Placement(pooled=("city",), replicated=("item",), sequence=("seen", "seller"))
    spec = ModelSpec(embedding_dim=4, num_embeddings=50, pool_rows=pool_rows)
    model = DLRM(spec, num_dense=0, placement=placement)
    with registry.path.open("a") as file:
        file.write(
            "pooling:\n"
            f"  - {{use: recd.din, features: [seen], options: {{target: {target}}}}}\n"
            "  - {use: recd.mean, features: [seller]}\n"
        )
    put_poolings(load_registry(registry.path), model)
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
    pooling = model.sequence_pooling
    assert pooling is not None
    pooled: list[torch.Tensor] = []
    pooling.register_forward_hook(lambda _module, _input, output: pooled.append(output[:, 0]))
    model(batch)
    with torch.no_grad():
        table.add_(torch.randn_like(table))
    model(batch)
    assert not torch.allclose(pooled[0], pooled[1], rtol=1e-6, atol=0)
    assert not pooled[1][1].any()
    assert not torch.equal(before, model(batch)[1][1])


def test_a_target_that_the_model_lacks_is_refused_with_its_line(registry: RunConfig) -> None:
    model = DLRM(ModelSpec(), num_dense=0, placement=Placement(("item",), sequence=("seen",)))
    with registry.path.open("a") as file:
        file.write("pooling: [{use: recd.din, features: [seen], options: {target: items}}]\n")
    with pytest.raises(
        RegistryError,
        match=r"registry\.yaml:6 pooling\[0\]\.options\.target: items is no feature that the "
        r"model looks up; did you mean item\?",
    ):
        put_poolings(load_registry(registry.path), model)


@pytest.mark.parametrize("mean", [0.001, 0.5, 0.9, 0.0, 1.0, None])
@pytest.mark.parametrize("architecture", ["dlrm", "dcn"])
def test_training_starts_at_the_mean_label(
    registry: RunConfig, monkeypatch: pytest.MonkeyPatch, architecture: str, mean: float | None
) -> None:
    text = registry.path.read_text().replace(
        "{embedding_dim", f"{{architecture: {architecture}, embedding_dim"
    )
    registry.path.write_text(text)
    registry = load_registry(registry.path)
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


def test_a_pooling_that_does_not_suit_the_model_is_refused_with_its_line(
    registry: RunConfig,
) -> None:
    model = DLRM(ModelSpec(), num_dense=0, placement=Placement(("item",), sequence=("seen",)))
    entry = "{use: recd.attention, features: [seen], options: {heads: 3}}"
    with registry.path.open("a") as file:
        file.write(f"pooling: [{entry}]\n")
    message = r"registry\.yaml:6 pooling\[0\]: recd.*: heads \(3\) must divide"
    with pytest.raises(RegistryError, match=message):
        put_poolings(load_registry(registry.path), model)

"""The demo model computes what its features say, in whatever order TorchRec returns them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.models.dlrm import InteractionArch
from torchrec.sparse.jagged_tensor import KeyedTensor

from recd_plugins.data.model_input import Placement
from recd_plugins.errors import RecdError, RegistryError
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.registry import ModelSpec, Registry, load_registry
from recd_plugins.training.dlrm import DLRM
from recd_plugins.training.prepare import build_model


def test_the_order_of_a_keyed_tensor_does_not_matter() -> None:
    placement = Placement(pooled=("a", "b", "c"))
    model = DLRM(ModelSpec(embedding_dim=4), num_dense=2, placement=placement)
    dense, vectors = torch.randn(5, 2), {name: torch.randn(5, 4) for name in "abc"}
    logits = []
    for order in ("abc", "cab"):
        tensor = KeyedTensor(list(order), [4] * 3, torch.cat([vectors[k] for k in order], dim=1))
        logits.append(model.top(dense, tensor, None, None))
    assert torch.equal(*logits)


def test_the_interaction_is_torchrecs() -> None:
    placement = Placement(pooled=("b", "a"), replicated=("c",))
    model = DLRM(ModelSpec(embedding_dim=4), num_dense=2, placement=placement)
    dense, vectors = torch.randn(5, 2), {name: torch.randn(5, 4) for name in "abc"}
    tensors = [
        KeyedTensor(list(keys), [4] * len(keys), torch.cat([vectors[k] for k in keys], dim=1))
        for keys in ("ab", "c")
    ]
    sparse = torch.stack([vectors[key] for key in "bac"], dim=1)
    assert model.top.dense_arch is not None
    interactions = InteractionArch(3)(model.top.dense_arch(dense), sparse)
    expected = model.top.over_arch(interactions).squeeze(1)
    torch.testing.assert_close(model.top(dense, *tensors, None), expected)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
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


def test_data_without_sparse_features_is_refused(registry: Registry) -> None:
    with pytest.raises(RecdError, match=r"registry.yaml: the dataset has no sparse feature"):
        build_model(registry, FeatureSchema(sparse=(), dense=("price",), label="label"))


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

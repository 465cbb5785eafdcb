"""The contract of models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.data.lower import lower
from recd_plugins.data.placement import placement_of
from recd_plugins.distributed.launch import launch
from recd_plugins.interfaces import Model, ModelFeatures, PluginOptions, Pooling, Sharding
from recd_plugins.model.build import model_of
from recd_plugins.model.one_row import one_row_tables
from recd_plugins.model.sequence_pooling import SequencePooling
from recd_plugins.model_tables import tables_of
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.fake_device import fake_device
from recd_plugins.values.batch import Batch
from recd_plugins.values.model_input import ModelInput, Placement

_ROWS = 8


class ModelContract(PluginContract):
    """Tests of a model: override the fixture ``plugin``."""

    @pytest.fixture
    def features(self) -> ModelFeatures:
        """What the model is fed, of a dataset that suits the plugin."""
        return ModelFeatures(num_dense=2, pooled=("user", "item"), sequence=("seen", "bought"))

    @pytest.fixture
    def model(self, plugin: Model, features: ModelFeatures) -> nn.Module:
        return _model(plugin, features)

    def test_one_seed_makes_one_model(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        again = _model(plugin, features).state_dict()
        assert list(again) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(value, again[name]), f"{name} has other initial weights"

    def test_stands_on_the_meta_device(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        with torch.device("meta"):
            meta = model_of(plugin, features)
        assert {p.device.type for p in meta.parameters()} == {"meta"}
        assert tables_of(meta) == tables_of(model)

    def test_tables_may_have_one_row(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        with one_row_tables():
            small = _model(plugin, features)
        one = [replace(table, num_embeddings=1) for table in tables_of(model)]
        assert tables_of(small) == one, "make collections of TorchRec, or call their __init__"
        small(_batch(small, features, deduplicated=False, most_ids=1))[0].backward()

    def test_looks_up_what_is_pooled_as_sequences(
        self, features: ModelFeatures, model: nn.Module
    ) -> None:
        pooled = {name for module in _poolings(model) for name in module.features}
        assert pooled >= {*features.sequence}, "SequencePooling pools what pooling entries name"
        assert {*placement_of(model, {}).sequence} >= pooled

    def test_every_parameter_is_trained(self, features: ModelFeatures, model: nn.Module) -> None:
        loss, _ = model(_batch(model, features, deduplicated=False))
        loss.backward()
        without = [name for name, p in model.named_parameters() if p.grad is None]
        assert not without, f"no gradient reaches {', '.join(without)}"

    def test_deduplicated_batches_have_the_same_loss(
        self, features: ModelFeatures, model: nn.Module
    ) -> None:
        model.eval()
        plain, unique = (_batch(model, features, deduplicated=of) for of in (False, True))
        torch.testing.assert_close(model(unique)[1], model(plain)[1], rtol=1e-5, atol=1e-6)

    def test_mixes_no_devices(self, plugin: Model, features: ModelFeatures) -> None:
        (lack,) = launch(_on_another_device, 1, plugin, features)
        if lack:
            pytest.skip(f"the model uses what the fake device has not: {lack}")

    def test_replicated_tables_stand_apart(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        """And are fed ``batch.replicated_features``: deduplicated input would be refused."""
        for table in tables_of(model):
            if table.pooled:
                replicated = replace(features, replicated=(table.name,))
                apart = _model(plugin, replicated)
                batch = _batch(apart, features, deduplicated=True, replicated=table.name)
                assert batch.replicated_features is not None
                apart(batch)[0].backward()


class _Sum(Pooling):
    """Sums."""

    name = "contract.sum"

    def build(self, embedding_dim: int) -> nn.Module:  # noqa: ARG002
        return _Sums()


class _Sums(nn.Module):
    def forward(self, rows: JaggedTensor) -> Tensor:
        return torch.stack([row.sum(0) for row in rows.to_dense()])


class _Replicating(Sharding):
    """Replicates."""

    name = "contract.replicating"
    replicates = True


def _on_another_device(_rank: int, _world_size: int, plugin: Model, features: ModelFeatures) -> str:
    """A step's loss and gradients are those of the CPU; what the device lacks, if anything."""
    with fake_device() as device:
        for deduplicated in (False, True):
            model = _model(plugin, features).eval()  # what is drawn on a device is its own
            batch = _batch(model, features, deduplicated=deduplicated)
            moved = deepcopy(model).to(device)
            # Before it is used: TorchRec's tensors keep what they computed where it was.
            try:
                found = moved(batch.to(device))[0]
            except NotImplementedError as error:
                return str(error)
            found.backward()
            assert found.device == device
            loss = model(batch)[0]
            loss.backward()
            torch.testing.assert_close(found.cpu(), loss)
            for (name, parameter), each in zip(
                model.named_parameters(), moved.parameters(), strict=True
            ):
                if each.grad is not None:  # FBGEMM has gradients for CPU and CUDA alone
                    torch.testing.assert_close(each.grad.cpu(), parameter.grad, msg=name)
    return ""


def _poolings(model: nn.Module) -> Sequence[SequencePooling]:
    return [module for module in model.modules() if isinstance(module, SequencePooling)]


def _model(plugin: Model, features: ModelFeatures) -> nn.Module:
    torch.manual_seed(0)
    model = model_of(plugin, features)
    for module in _poolings(model):
        for name in module.features:
            module.put(name, _Sum(PluginOptions()))
    return model


def _batch(
    model: nn.Module,
    features: ModelFeatures,
    *,
    deduplicated: bool,
    replicated: str = "",
    most_ids: int | None = None,
) -> ModelInput:
    """Rows of which every second is the one before, some of them empty, as a loader gives them."""
    generator = torch.Generator().manual_seed(0)
    rows = {table: table.num_embeddings for table in tables_of(model)}
    ids: dict[str, JaggedTensor] = {}
    for table, num_rows in rows.items():
        for name in table.features:
            lengths = torch.randint(4, (_ROWS // 2,), generator=generator).repeat_interleave(2)
            each = [
                torch.randint(min(num_rows, most_ids or 50), (int(n),), generator=generator)
                for n in lengths[::2]
            ]
            ids[name] = JaggedTensor(torch.cat([torch.cat([x, x]) for x in each]), lengths=lengths)
    kjt = KeyedJaggedTensor.from_jt_dict(ids)
    batch = Batch(
        dense_features=torch.rand(_ROWS, features.num_dense, generator=generator),
        labels=torch.randint(2, (_ROWS,), generator=generator).float(),
        kjt=None if deduplicated else kjt,
        ikjts=tuple(InverseKeyedJaggedTensor.from_kjt(kjt, [[n] for n in ids]))
        if deduplicated
        else (),
    )
    plugins: dict[str, Sharding] = {replicated: _Replicating(PluginOptions())} if replicated else {}
    placement: Placement = placement_of(model, plugins)
    return lower(batch, placement)

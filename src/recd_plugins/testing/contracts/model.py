"""The contract of models."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.data.lower import lower
from recd_plugins.data.prepared import placement_of
from recd_plugins.interfaces import Model, ModelFeatures, PluginOptions, Pooling, Sharding
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.deferred_tables import one_row_tables
from recd_plugins.model.sequence_pooling import SequencePooling
from recd_plugins.runtime.launch import launch
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.testing.contracts.plugin import PluginContract, pairs_of_rows
from recd_plugins.testing.fake_device import fake_device
from recd_plugins.training.checkpoint import common_name

_ROWS = 8


class ModelContract(PluginContract):
    """Tests of a model: override the fixture ``plugin``."""

    @pytest.fixture
    def features(self) -> ModelFeatures:
        """Return the features of a dataset that fits the plugin."""
        return ModelFeatures(
            num_dense=2,
            pooled=("user", "item"),
            sequence=("seen", "bought"),
            positive_counts=_some_counts,
        )

    @pytest.fixture
    def loss_of_each_row(self) -> bool:
        """Return whether the loss is a mean over rows. Override it for losses across rows."""
        return True

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
        _assert_same_output(features, model, _model(plugin, features))

    def test_a_state_dict_restores_it(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        """The second model has other initial weights and uncounted features."""
        uncounted = features
        if features.positive_counts is not None:
            uncounted = replace(features, positive_counts=_no_counts)
        restored = _model(plugin, uncounted, seed=1)
        restored.load_state_dict(deepcopy(model.state_dict()))
        _assert_same_output(features, model, restored)

    def test_stands_on_the_meta_device(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        with torch.device("meta"), plugin_call(plugin, "build"):
            meta = plugin.build(features)
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
        assert {*placement_of(embedding_modules(model), {}).sequence} >= pooled

    def test_gives_loss_and_logits(self, features: ModelFeatures, model: nn.Module) -> None:
        """In ``loss, (loss, logits [B], labels [B])``, only the first loss has a graph."""
        batch = _batch(model, features, deduplicated=False)
        loss, (again, logits, labels) = model(batch)
        assert loss.dim() == again.dim() == 0
        assert logits.shape == batch.labels.shape
        assert torch.equal(labels, batch.labels)
        assert torch.equal(loss.detach(), again)
        assert loss.requires_grad
        assert not any(each.requires_grad for each in (again, logits)), "detach loss and logits"

    def test_every_parameter_is_trained(self, features: ModelFeatures, model: nn.Module) -> None:
        loss, _ = model(_batch(model, features, deduplicated=False))
        loss.backward()
        _assert_trained(model)

    def test_the_loss_is_the_mean_of_rows(
        self, features: ModelFeatures, model: nn.Module, loss_of_each_row: bool
    ) -> None:
        if not loss_of_each_row:
            pytest.skip("loss_of_each_row is False")
        model.eval()
        once, twice = (
            model(_batch(model, features, deduplicated=False, times=times))[0] for times in (1, 2)
        )
        message = (
            "repeating a batch changes the loss: take the mean over rows, or let the fixture "
            "loss_of_each_row return False"
        )
        torch.testing.assert_close(
            twice, once, rtol=1e-4, atol=1e-6, msg=lambda difference: f"{message}: {difference}"
        )

    def test_deduplicated_batches_have_the_same_loss(
        self, features: ModelFeatures, model: nn.Module
    ) -> None:
        model.eval()
        plain, unique = (_step(model, features, deduplicated=of) for of in (False, True))
        torch.testing.assert_close(unique[0], plain[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(unique[1], plain[1], rtol=1e-4, atol=1e-6)

    def test_mixes_no_devices(self, plugin: Model, features: ModelFeatures) -> None:
        try:
            pickle.dumps(features)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            pytest.fail(
                f"the fixture features cannot be pickled ({error}): make positive_counts a "
                "function of the module"
            )
        (lack,) = launch(_on_another_device, 1, plugin, features)
        if lack:
            pytest.skip(f"the fake device lacks an operator: {lack}")

    def test_replicated_tables_stand_apart(
        self, plugin: Model, features: ModelFeatures, model: nn.Module
    ) -> None:
        """Separate collections look up ``batch.replicated_features``."""
        bags = [table.name for table in tables_of(model) if table.pooled]
        each = [(name,) for name in bags]
        for names in [*each, tuple(bags)] if len(bags) > 1 else each:
            apart = _model(plugin, replace(features, replicated=names))
            found = {common_name(name) for name in apart.state_dict()}
            assert found == {*model.state_dict()}, (
                "checkpoints would not load at another placement: name the collection of "
                "replicated tables replicated_ and the name of the other one"
            )
            batch = _batch(apart, features, deduplicated=True, replicated=names)
            assert batch.replicated_features is not None
            apart(batch)[0].backward()
            _assert_trained(apart, f", where {', '.join(names)} is replicated")


def _assert_trained(model: nn.Module, where: str = "") -> None:
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without, f"no gradient reaches {', '.join(without)}{where}"


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
    """Compare loss and gradients with the CPU. Return an error of the device or an empty string."""
    with fake_device() as device:
        for deduplicated in (False, True):
            model = _model(plugin, features).eval()  # dropout draws other numbers on a device
            batch = _batch(model, features, deduplicated=deduplicated)
            # Moved before use: TorchRec's tensors cache what they compute.
            moved, there = deepcopy(model).to(device), batch.to(device)
            loss = model(batch)[0]
            loss.backward()
            try:
                found = moved(there)[0]
            except NotImplementedError as error:  # here alone: the CPU has it
                return str(error)
            found.backward()
            assert found.device == device
            torch.testing.assert_close(found.cpu(), loss)
            for (name, parameter), each in zip(
                model.named_parameters(), moved.parameters(), strict=True
            ):
                if each.grad is not None:  # FBGEMM has gradients for CPU and CUDA alone
                    torch.testing.assert_close(each.grad.cpu(), parameter.grad, msg=name)
    return ""


def _poolings(model: nn.Module) -> Sequence[SequencePooling]:
    return [module for module in model.modules() if isinstance(module, SequencePooling)]


def _some_counts(feature: str, num_embeddings: int) -> NDArray[np.int64]:  # noqa: ARG001
    return np.arange(num_embeddings) % 7


def _no_counts(feature: str, num_embeddings: int) -> NDArray[np.int64]:  # noqa: ARG001
    return np.zeros(num_embeddings, np.int64)


def _assert_same_output(features: ModelFeatures, model: nn.Module, other: nn.Module) -> None:
    batch = _batch(model, features, deduplicated=False)
    torch.testing.assert_close(other.eval()(batch), model.eval()(batch), rtol=0, atol=0)


def _model(plugin: Model, features: ModelFeatures, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with plugin_call(plugin, "build"):
        model = plugin.build(features)
    for module in _poolings(model):
        for name in module.features:
            module.put(name, _Sum(PluginOptions()))
    return model


def _step(
    model: nn.Module, features: ModelFeatures, *, deduplicated: bool
) -> tuple[Any, dict[str, Tensor | None]]:
    """Return the model's output, and gradients by parameter."""
    model.zero_grad()
    loss, said = model(_batch(model, features, deduplicated=deduplicated))
    loss.backward()
    return said, {name: parameter.grad for name, parameter in model.named_parameters()}


def _batch(
    model: nn.Module,
    features: ModelFeatures,
    *,
    deduplicated: bool,
    replicated: Sequence[str] = (),
    most_ids: int | None = None,
    times: int = 1,
) -> ModelInput:
    """Return a batch of pairs of equal rows, some empty, repeated ``times`` times."""
    generator = torch.Generator().manual_seed(0)
    ids: dict[str, JaggedTensor] = {}
    for table in tables_of(model):
        most = min(table.num_embeddings, most_ids or 50)
        for name in table.features:
            ids[name] = pairs_of_rows(
                torch.randint(4, (_ROWS // 2,), generator=generator), most, generator
            )
    kjt = KeyedJaggedTensor.from_jt_dict(
        {
            name: JaggedTensor(each.values().repeat(times), lengths=each.lengths().repeat(times))
            for name, each in ids.items()
        }
    )
    unique = InverseKeyedJaggedTensor.from_kjt(kjt, [[n] for n in ids]) if deduplicated else ()
    batch = Batch(
        dense_features=torch.rand(_ROWS, features.num_dense, generator=generator).repeat(times, 1),
        labels=torch.randint(2, (_ROWS,), generator=generator).float().repeat(times),
        kjt=None if deduplicated else kjt,
        ikjts=tuple(unique),
    )
    plugins: dict[str, Sharding] = {name: _Replicating(PluginOptions()) for name in replicated}
    placement: Placement = placement_of(embedding_modules(model), plugins)
    return lower(batch, placement)

"""Test suites for pooling plugins, which reduce the embeddings of a row to one vector."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.interfaces import Pooling, TargetPooling
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.fake_cuda import fake_cuda

_LENGTHS = [3, 0, 1, 3, 7, 0]
#: Row lengths of each group: mixed, very different, all empty, equal, and no rows.
_GROUPS = [_LENGTHS, [1, 60, 2, 0, 9, 12], [0] * 6, [4] * 6, []]
_GROUP_SIZES = [3, 1, 2, 3, 2]  # features of each group in one call of pool_groups
#: The unique row of each batch row.
_INVERSE = [4, 0, 4, 1, 2, 4, 4, 3, 5, 0, 4, 4, 4]


class _AnyPoolingContract(PluginContract):
    embedding_dim: ClassVar[int] = 8

    @pytest.fixture
    def module(self, plugin: Pooling) -> nn.Module:
        torch.manual_seed(0)
        return plugin.build(self.embedding_dim)

    def test_mixes_no_devices(self, plugin: Pooling) -> None:
        launch(_on_another_device, 1, plugin, self.embedding_dim)


class PoolingContract(_AnyPoolingContract):
    """Test suite for a pooling plugin. Subclasses override the fixture ``plugin``."""

    @pytest.fixture
    def rows(self) -> list[Tensor]:
        """Return float32 embeddings ``[length, embedding_dim]`` per row. Some rows are empty."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(length, self.embedding_dim, generator=generator) for length in _LENGTHS]

    def test_every_build_is_a_module_of_its_own(self, plugin: Pooling) -> None:
        first, second = plugin.build(self.embedding_dim), plugin.build(self.embedding_dim)
        assert isinstance(first, nn.Module)
        assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
        second.load_state_dict(first.state_dict())

    def test_gives_one_vector_a_row(self, module: nn.Module, rows: list[Tensor]) -> None:
        pooled = module(_jagged(rows))
        assert isinstance(pooled, Tensor)
        assert pooled.shape == (len(rows), self.embedding_dim), "one vector for each row"
        assert pooled.dtype == torch.float32
        assert bool(pooled.isfinite().all())
        _assert_zeros_if_empty(pooled, [len(row) for row in rows])

    @pytest.mark.parametrize("num_rows", [0, 1, 3])
    def test_takes_input_without_values(
        self, plugin: Pooling, module: nn.Module, num_rows: int
    ) -> None:
        values = torch.zeros(0, self.embedding_dim).requires_grad_()
        pooled = module(_jagged([torch.zeros(0, self.embedding_dim)] * num_rows, values))
        assert pooled.shape == (num_rows, self.embedding_dim)
        assert not pooled.any()
        _assert_trained_if_always(plugin, module, pooled)

    def test_a_row_depends_on_itself_alone(self, module: nn.Module, rows: list[Tensor]) -> None:
        """The vector of a row must not depend on other rows, because equal rows are pooled once."""
        values = torch.cat(rows).requires_grad_()
        pooled = module(_jagged(rows, values))
        for row, vector in zip(rows, pooled, strict=True):
            torch.testing.assert_close(module(_jagged([row]))[0], vector, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            module(_jagged(rows[::-1])), pooled.flip(0), rtol=1e-5, atol=1e-6
        )
        (gradients,) = torch.autograd.grad(pooled[0].square().sum(), [values])
        assert not gradients[len(rows[0]) :].any(), "a vector's gradient reaches other rows"

    def test_a_group_is_pooled_as_its_features_one_by_one(self, plugin: Pooling) -> None:
        modules = _modules(plugin, self.embedding_dim, num_features=3)
        for lengths in _GROUPS:
            sequences = _group(lengths, self.embedding_dim)
            expected = [module(each) for module, each in zip(modules, sequences, strict=True)]
            pooled = plugin.pool(modules, sequences)
            _assert_same(plugin, pooled, torch.stack(expected, dim=1), modules, sequences)

    def test_groups_are_pooled_as_one_by_one(self, plugin: Pooling) -> None:
        modules = iter(_modules(plugin, self.embedding_dim, sum(_GROUP_SIZES)))
        groups = [
            (list(islice(modules, size)), _group(lengths, self.embedding_dim)[:size])
            for lengths, size in zip(_GROUPS, _GROUP_SIZES, strict=True)
        ]
        pooled = plugin.pool_groups(groups)
        expected = [plugin.pool(*group) for group in groups]
        assert [each.shape for each in pooled] == [each.shape for each in expected]
        _assert_same(
            plugin,
            torch.cat([each.flatten() for each in pooled]),
            torch.cat([each.flatten() for each in expected]),
            [module for group, _ in groups for module in group],
            [sequence for _, sequences in groups for sequence in sequences],
        )

    def test_gradients_reach_embeddings_and_parameters(
        self, module: nn.Module, rows: list[Tensor]
    ) -> None:
        values = torch.cat(rows).requires_grad_()
        pooled = module(_jagged(rows, values))
        (pooled * torch.randn(pooled.shape)).sum().backward()
        _assert_trained(module, values)


class TargetPoolingContract(_AnyPoolingContract):
    """Test suite for a pooling plugin with target items. Subclasses override ``plugin``."""

    @pytest.fixture
    def targets(self) -> Tensor:
        return _targets(self.embedding_dim)

    def test_it_names_its_target(self, plugin: TargetPooling) -> None:
        assert isinstance(plugin.target, str)
        assert plugin.target

    def test_a_group_of_unique_rows_is_pooled_as_all_rows_one_by_one(
        self, plugin: TargetPooling, targets: Tensor
    ) -> None:
        inverse = torch.tensor(_INVERSE)
        modules = _modules(plugin, self.embedding_dim, num_features=3)
        for lengths in _GROUPS[:-1]:
            sequences = _group(lengths, self.embedding_dim)
            pooled = plugin.pool_for(modules, sequences, targets, inverse)
            assert pooled.shape == (len(_INVERSE), 3, self.embedding_dim)
            every = [_expanded(each, _INVERSE) for each in sequences]
            expected = plugin.pool_for(modules, every, targets, None)
            _assert_same(plugin, pooled, expected, modules, sequences)
            pairs = zip(modules, sequences, strict=True)
            one_by_one = [module(each, targets, inverse) for module, each in pairs]
            _assert_same(plugin, pooled, torch.stack(one_by_one, dim=1), modules, sequences)

    @pytest.mark.parametrize("batch_size", [0, 4])
    def test_takes_input_without_values(
        self, plugin: TargetPooling, module: nn.Module, batch_size: int
    ) -> None:
        num_rows = min(batch_size, 2)
        nothing = torch.zeros(0, self.embedding_dim)
        sequence = _jagged([nothing] * num_rows, nothing)
        inverse = torch.arange(batch_size) % max(num_rows, 1)
        pooled = module(sequence, torch.randn(batch_size, self.embedding_dim), inverse)
        assert pooled.shape == (batch_size, self.embedding_dim)
        assert not pooled.any()
        _assert_trained_if_always(plugin, module, pooled)

    def test_a_vector_depends_on_its_target(self, module: nn.Module, targets: Tensor) -> None:
        sequence = _group(_LENGTHS, self.embedding_dim)[0]
        inverse = torch.tensor(_INVERSE)
        pooled = module(sequence, targets, inverse)
        _assert_zeros_if_empty(pooled, [_LENGTHS[row] for row in _INVERSE])
        changed = targets.clone()
        changed[0] += 1  # of a row with several values
        difference = module(sequence, changed, inverse) - pooled
        assert difference[0].abs().max() > 1e-5
        assert difference[1:].abs().max() < 1e-5

    def test_gradients_reach_embeddings_targets_and_parameters(
        self, module: nn.Module, targets: Tensor
    ) -> None:
        sequence = _group(_LENGTHS, self.embedding_dim)[0]
        targets.requires_grad_()
        pooled = module(sequence, targets, torch.tensor(_INVERSE))
        (pooled * torch.randn(pooled.shape)).sum().backward()
        _assert_trained(module, sequence.values(), targets)


def _targets(dim: int) -> Tensor:
    return torch.randn(len(_INVERSE), dim, generator=torch.Generator().manual_seed(2))


def _modules(plugin: Pooling, dim: int, num_features: int) -> list[nn.Module]:
    torch.manual_seed(3)
    modules = [plugin.build(dim) for _ in range(num_features)]
    for module in modules:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)  # zeros would hide mistakes
    return modules


def _group(lengths: list[int], dim: int) -> list[JaggedTensor]:
    """Return three features with random embeddings. The second has the row lengths reversed."""
    generator = torch.Generator().manual_seed(4)
    return [
        JaggedTensor(
            torch.randn(sum(lengths), dim, generator=generator).requires_grad_(),
            lengths=torch.tensor(each, dtype=torch.int64),
        )
        for each in (lengths, lengths[::-1], lengths)
    ]


def _jagged(rows: list[Tensor], values: Tensor | None = None) -> JaggedTensor:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return JaggedTensor(values=torch.cat(rows) if values is None else values, lengths=lengths)


def _expanded(sequence: JaggedTensor, inverse: list[int]) -> JaggedTensor:
    rows = torch.split(sequence.values(), sequence.lengths().tolist())
    return _jagged([rows[row] for row in inverse])


def _on_another_device(_rank: int, _world_size: int, plugin: Pooling, dim: int) -> None:
    """Check that pooling on the fake device gives the same vectors and gradients as on the CPU."""

    def pooled(device: torch.device) -> Tensor:
        on = list(deepcopy(nn.ModuleList(modules)).to(device))
        moved = [each.to(device) for each in sequences]
        if not isinstance(plugin, TargetPooling):
            groups = [(on[:2], moved[:2]), (on[2:], moved[2:])]
            return torch.cat([each.flatten() for each in plugin.pool_groups(groups)])
        inverse = torch.tensor(_INVERSE, device=device)
        return plugin.pool_for(on, moved, _targets(dim).to(device), inverse)

    with fake_cuda() as device:
        modules, sequences = _modules(plugin, dim, num_features=3), _group(_LENGTHS, dim)
        found = pooled(device)
        assert found.device == device
        _assert_same(plugin, found.cpu(), pooled(torch.device("cpu")), [], sequences)


def _assert_same(
    plugin: Pooling,
    pooled: Tensor,
    expected: Tensor,
    modules: list[nn.Module],
    sequences: list[JaggedTensor],
) -> None:
    """Assert that pooled vectors are equal, and gradients of all embeddings and parameters."""
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
    inputs = [sequence.values() for sequence in sequences]
    inputs += [parameter for module in modules for parameter in module.parameters()]
    weights = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(5))

    def gradients(vectors: Tensor) -> tuple[Tensor, ...]:
        total = (vectors * weights).sum()
        if not plugin.always_trained:  # an input without a gradient counts as zeros
            total = total + 0 * sum(each.sum() for each in inputs)
        return torch.autograd.grad(total, inputs, retain_graph=True)

    torch.testing.assert_close(gradients(pooled), gradients(expected), rtol=1e-4, atol=1e-5)


def _assert_zeros_if_empty(pooled: Tensor, lengths: list[int]) -> None:
    for length, vector in zip(lengths, pooled, strict=True):
        assert length or not vector.any(), "the vector of an empty row is zeros"


def _assert_trained(module: nn.Module, *inputs: Tensor) -> None:
    for each in inputs:
        assert each.grad is not None
        assert each.grad.any()
        assert bool(each.grad.isfinite().all())
    without = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not without, f"no gradient reaches {', '.join(without)}"


def _assert_trained_if_always(plugin: Pooling, module: nn.Module, pooled: Tensor) -> None:
    if plugin.always_trained and any(True for _ in module.parameters()):
        pooled.sum().backward()  # type: ignore[no-untyped-call]
        _assert_trained(module)

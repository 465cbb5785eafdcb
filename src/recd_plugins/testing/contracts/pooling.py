"""The contract of pooling."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.interfaces import Pooling
from recd_plugins.testing.contracts.plugin import PluginContract

_LENGTHS = [3, 0, 1, 3, 7, 0]


class PoolingContract(PluginContract):
    """Tests of a pooling plugin: override the fixture ``plugin``."""

    embedding_dim: ClassVar[int] = 8

    @pytest.fixture
    def module(self, plugin: Pooling) -> nn.Module:
        torch.manual_seed(0)
        return plugin.build(self.embedding_dim)

    @pytest.fixture
    def rows(self) -> list[Tensor]:
        """Embeddings by row, ``[length, embedding_dim]``; the last row is empty."""
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(length, self.embedding_dim, generator=generator) for length in _LENGTHS]

    def test_gives_one_vector_a_row(self, module: nn.Module, rows: list[Tensor]) -> None:
        pooled = module(_jagged(rows))
        assert pooled.shape == (len(rows), self.embedding_dim)
        assert pooled.dtype == torch.float32
        assert bool(pooled.isfinite().all())

    def test_an_empty_row_gives_zeros(self, module: nn.Module, rows: list[Tensor]) -> None:
        pooled = module(_jagged(rows))
        for row, vector in zip(rows, pooled, strict=True):
            assert len(row) > 0 or not vector.any(), "the vector of an empty row is zeros"

    @pytest.mark.parametrize("num_rows", [0, 1, 3])
    def test_takes_input_without_values(self, module: nn.Module, num_rows: int) -> None:
        pooled = module(_jagged([torch.zeros(0, self.embedding_dim)] * num_rows))
        assert pooled.shape == (num_rows, self.embedding_dim)
        assert not pooled.any()

    def test_a_row_depends_on_itself_alone(self, module: nn.Module, rows: list[Tensor]) -> None:
        """Pooling unique rows and repeating the vectors must equal pooling all rows."""
        pooled = module(_jagged(rows))
        for row, vector in zip(rows, pooled, strict=True):
            torch.testing.assert_close(module(_jagged([row]))[0], vector, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            module(_jagged(rows[::-1])), pooled.flip(0), rtol=1e-5, atol=1e-6
        )

    def test_gradients_reach_embeddings_and_parameters(
        self, module: nn.Module, rows: list[Tensor]
    ) -> None:
        values = torch.cat(rows).requires_grad_()
        weights = torch.randn(len(rows), self.embedding_dim)
        (module(_jagged(rows, values)) * weights).sum().backward()
        assert values.grad is not None
        assert values.grad.any()
        assert bool(values.grad.isfinite().all())
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {name}"

    def test_gradients_of_a_row_come_from_its_vector_alone(
        self, module: nn.Module, rows: list[Tensor]
    ) -> None:
        values = torch.cat(rows).requires_grad_()
        module(_jagged(rows, values))[0].square().sum().backward()
        assert values.grad is not None
        assert not values.grad[len(rows[0]) :].any()

    def test_every_build_is_a_module_of_its_own(self, plugin: Pooling) -> None:
        first, second = plugin.build(self.embedding_dim), plugin.build(self.embedding_dim)
        assert isinstance(first, nn.Module)
        assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
        second.load_state_dict(first.state_dict())


def _jagged(rows: list[Tensor], values: Tensor | None = None) -> JaggedTensor:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if values is None:
        values = torch.cat(rows) if rows else torch.zeros(0, PoolingContract.embedding_dim)
    return JaggedTensor(values=values, lengths=lengths)

"""Kernels in TorchRec's lookups: which of them are asked to fetch rows ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat import lookup_kernels
from recd_plugins.sharding.overlap import LookupAhead


class Kernel:
    def __init__(
        self, compute_kernel: EmbeddingComputeKernel, num_features: int, pipelined: bool = True
    ) -> None:
        self.prefetch_pipeline = pipelined
        self.fetched: list[list[int]] = []
        self.emb_module = self
        tables = [SimpleNamespace(compute_kernel=compute_kernel)]
        # As TorchRec groups tables.
        self.config = SimpleNamespace(
            compute_kernel=EmbeddingComputeKernel.FUSED,
            embedding_tables=tables,
            num_features=lambda: num_features,
        )

    def prefetch(self, indices: torch.Tensor, offsets: torch.Tensor, *_: Any) -> None:
        assert int(offsets[-1]) == len(indices)
        self.fetched.append(indices.tolist())


def test_only_kernels_with_a_cache_fetch_ahead() -> None:
    plain = Kernel(EmbeddingComputeKernel.FUSED, 1)
    cached = Kernel(EmbeddingComputeKernel.FUSED_UVM_CACHING, 2)
    unlocked = Kernel(EmbeddingComputeKernel.FUSED_UVM_CACHING, 1, pipelined=False)
    lookup: Any = SimpleNamespace(_emb_modules=[plain, cached, unlocked])
    features = KeyedJaggedTensor(
        ["a", "b", "c", "d"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([1, 2, 1, 1])
    )
    lookup_kernels._prefetch(lookup, features)
    assert (plain.fetched, cached.fetched, unlocked.fetched) == ([], [[2, 3, 4]], [])


@pytest.mark.parametrize(
    ("planned", "of_sharder", "ahead"),
    [
        (CacheParams(prefetch_pipeline=True), False, True),
        (CacheParams(prefetch_pipeline=False), True, False),
        (CacheParams(load_factor=0.5), True, True),
        (None, True, True),
        (None, False, False),
    ],
)
def test_a_cache_looks_ahead_where_plan_or_sharder_ask(
    planned: CacheParams | None, of_sharder: bool, ahead: bool
) -> None:
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    plan = {"t": ParameterSharding("table_wise", kernel, [0], cache_params=planned)}
    module: Any = nn.Module()
    module.module_sharding_plan = plan
    module.fused_params = {"prefetch_pipeline": of_sharder}
    assert lookup_kernels.prefetches(module) == ahead


class Counting(nn.Module):
    """A kernel that counts its steps as FBGEMM's of Adam do, and the step that it learned by."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate_tensor = torch.tensor(0.5)
        self.iter_cpu, self.iter = torch.zeros(1), torch.zeros(1)
        self.learned: list[tuple[float, float]] = []

    def forward(self, features: Tensor) -> Tensor:
        self.iter.add_(1)
        step, rate = float(self.iter_cpu.add_(1)), float(self.learning_rate_tensor)
        rows = features.clone().requires_grad_()
        rows.register_hook(lambda _: self.learned.append((step, rate)))  # type: ignore[no-untyped-call]
        return rows * 1


@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_a_step_is_counted_once_whatever_its_rate(rate: float) -> None:
    kernel = Counting()
    for step in (1, 2, 3):
        ahead: Any = LookupAhead(nn.Sequential(kernel))
        rows = ahead(torch.ones(3))
        # As a checkpoint has it that is written now.
        assert (int(kernel.iter_cpu), int(kernel.iter)) == (step - 1, step - 1)
        kernel.learning_rate_tensor.fill_(rate)
        rows.sum().backward()
        assert kernel.learned[-1] == (step, rate)
        assert (int(kernel.iter_cpu), int(kernel.iter)) == (step, step)
        kernel.learning_rate_tensor.fill_(0.5)
    assert len(kernel.learned) == 3

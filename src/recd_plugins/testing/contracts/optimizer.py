"""The contract of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.utils import convert_to_fbgemm_types, merge_fused_params

from recd_plugins.compat.row_updates import ON_CPU, kind_of_update, unheeded_argument
from recd_plugins.interfaces import Optimizer, RowUpdate, Table
from recd_plugins.testing.contracts.plugin import PluginContract


class OptimizerContract(PluginContract):
    """Tests of an optimizer: override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Tables that the plugin trains: one of pooled features, one of a sequence."""
        return (
            Table("t_user", ("user",), 100, 16, pooled=True),
            Table("t_history", ("history",), 50, 8, pooled=False),
        )

    def test_fbgemm_has_the_update(self, plugin: Optimizer, tables: Sequence[Table]) -> None:
        for table in tables:
            update = plugin.update(table)
            assert isinstance(update, RowUpdate)
            kind = kind_of_update(update.optimizer, update.arguments)
            assert not unheeded_argument(kind, update.arguments, None)

    def test_its_class_takes_the_arguments(
        self, plugin: Optimizer, tables: Sequence[Table]
    ) -> None:
        for table in tables:
            optimizer, arguments = plugin.update(table)
            shape = table.num_embeddings, table.embedding_dim
            optimizer([torch.nn.Parameter(torch.empty(shape, device="meta"))], **arguments)

    def test_every_rank_comes_to_the_same(self, plugin: Optimizer, tables: Sequence[Table]) -> None:
        for table in tables:
            first = plugin.update(table)
            # Again, and made anew from its options, as on each rank.
            assert plugin.update(table) == copy(plugin).update(table) == first

    def test_it_trains_the_rows_that_are_read(
        self, plugin: Optimizer, tables: Sequence[Table]
    ) -> None:
        for table in tables:
            before, after = _trained(plugin.update(table), table)
            assert torch.isfinite(after).all()
            moved = (before != after).any(dim=1)
            assert moved[:2].all(), "rows 0 and 1 were read"
            assert not moved[2:].any(), "no other row was"


def _trained(update: RowUpdate, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after two steps that read rows 0 and 1."""
    kind = kind_of_update(update.optimizer, update.arguments)
    if kind not in ON_CPU:
        pytest.skip(f"FBGEMM has {kind.value} for CUDA alone")
    arguments: dict[str, Any] = dict(update.arguments)
    arguments.setdefault("optimizer", kind)
    shape = table.num_embeddings, table.embedding_dim
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(*shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        **convert_to_fbgemm_types(merge_fused_params({}, arguments)),
    )
    (weights,) = kernel.split_embedding_weights()
    weights.copy_(torch.linspace(-1, 1, weights.numel()).view(shape))
    before = weights.clone()
    for _ in range(2):
        kernel(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])).square().sum().backward()
    return before, weights

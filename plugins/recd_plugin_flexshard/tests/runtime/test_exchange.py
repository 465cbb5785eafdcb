"""Rows move between cold shards and overlays bit for bit."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata

from recd_plugin_flexshard.runtime.rows import RowBlocks
from recd_plugin_flexshard.tests.runtime.exchange_cases import (
    Case,
    exchange_rows,
    exchange_rows_on_another_device,
    exchange_rows_on_cuda,
)
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import CUDA_BACKEND, launch
from recd_plugins.testing.gloo import run_on_ranks

CASES = {
    "weights": Case((11, 30), (4,), torch.float32, num_hot=7, num_flex=13),
    "row-wise state": Case((11, 30), (), torch.float32, num_hot=7, num_flex=13),
    "half precision": Case((40,), (6,), torch.float16, num_hot=5, num_flex=5),
    "in pieces": Case((25, 26), (4,), torch.float32, num_hot=17, num_flex=19, piece_bytes=48),
    "ranks without cold rows": Case((5, 3), (4,), torch.float32, num_hot=2, num_flex=3),
    "no hot rows": Case((9,), (4,), torch.float32, num_hot=0, num_flex=4),
    "no flex rows": Case((9,), (4,), torch.float32, num_hot=4, num_flex=0),
    "every row hot or flex": Case((9, 8), (4,), torch.float32, num_hot=8, num_flex=9),
}


@pytest.mark.parametrize(
    ("name", "num_nodes", "ranks_per_node"),
    [
        (name, *layout)
        for layouts in (((2, 2), (1, 2)), ((2, 1), (2, 2), (1, 1)))
        for name, layout in zip(CASES, cycle(layouts))
    ],
)
def test_rows_move_bit_for_bit(name: str, num_nodes: int, ranks_per_node: int) -> None:
    wrong = run_on_ranks(exchange_rows, num_nodes * ranks_per_node, CASES[name], ranks_per_node)
    assert wrong == [[]] * len(wrong)


@pytest.mark.parametrize("name", ["weights", "in pieces"])
def test_rows_move_on_another_device(name: str) -> None:
    wrong = run_on_ranks(exchange_rows_on_another_device, 2, CASES[name], 1)
    assert wrong == [[], []]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", CASES)
def test_rows_move_over_nccl(name: str) -> None:
    world_size = torch.cuda.device_count()
    wrong = launch(exchange_rows_on_cuda, world_size, CASES[name], 1, backend=CUDA_BACKEND)
    assert wrong == [[]] * len(wrong)


def test_blocks_follow_the_metadata() -> None:
    blocks = RowBlocks.of("t", _metadata([(0, 4, 2), (4, 0, 0), (4, 3, 1)]))
    owners, local = blocks.locate(torch.tensor([6, 0, 3, 4]))
    assert owners.tolist() == [1, 2, 2, 1]
    assert local.tolist() == [2, 0, 3, 0]


@pytest.mark.parametrize(
    ("shards", "columns"), [([(0, 4, 0), (4, 4, 0)], 2), ([(0, 8, 0)], 4)], ids=["rows", "columns"]
)
def test_a_table_that_is_not_row_wise_is_refused(
    shards: list[tuple[int, int, int]], columns: int
) -> None:
    with pytest.raises(SetupError, match="table t: tiers need a row-wise table"):
        RowBlocks.of("t", _metadata(shards, columns))


def _metadata(shards: list[tuple[int, int, int]], columns: int = 2) -> ShardedTensorMetadata:
    """Shards by first row, number of rows and rank, each of two columns."""
    return ShardedTensorMetadata(
        [ShardMetadata([start, 0], [rows, 2], f"rank:{rank}/cpu") for start, rows, rank in shards],
        torch.Size([max(start + rows for start, rows, _ in shards), columns]),
    )

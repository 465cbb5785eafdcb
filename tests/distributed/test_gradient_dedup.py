"""Gradients of rows arrive as they do by TorchRec's all-to-all, and equal ones travel once."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.sharded import configs, local_weights, shard
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodecs
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding import gradient_dedup
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.sharding.sharders import ExactEmbeddingCollectionSharder
from recd_plugins.sharding.wire import Int8, wire_codecs
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="gloo sends them between CPUs")

_ROWS, _DIM = 40, 8
_SEQUENCES = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name


SIZES = [(1, 1), (300, 7), (300, 300)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dim", [3, 16])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [*product(SIZES, DTYPES), ((70_000, 60), torch.bfloat16)]
)
def test_a_message_is_read_as_it_was(sizes: tuple[int, int], dtype: torch.dtype, dim: int) -> None:
    num_rows, distinct = sizes
    torch.manual_seed(0)
    rows = torch.randn(distinct, dim).to(dtype)[torch.arange(num_rows) * 31 % distinct]
    rows[0, 0] = -0.0
    rows[-1, -1] = float("nan")
    width = dim * rows.element_size()
    for compares in (True, False):
        message = gradient_dedup._message(rows, compares=compares)
        received = torch.zeros(gradient_dedup._message_size(num_rows, width), dtype=torch.uint8)
        received[: len(message)] = message
        read = torch.empty_like(rows)
        gradient_dedup._read(received, read)
        assert torch.equal(read.view(torch.uint8), rows.view(torch.uint8))
        assert len(message) <= 8 + num_rows * width
    if (num_rows, distinct, dim) == (300, 7, 16):
        # What was put in makes two more; 16 bits a row and, of a message, a number.
        assert len(gradient_dedup._message(rows, compares=True)) == 8 + 600 + 9 * width


def _features(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    num_rows = 0 if (rank, step) == (0, 1) else 3 + rank
    lengths = torch.randint(6, (3 * num_rows,), generator=generator)
    ids = torch.randint(_ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths, stride=num_rows)


def trained(
    rank: int,
    world_size: int,
    sharding: str,
    coalesced: list[str],
    wire: Literal["fp32", "fp16", "bf16", "int8"],
    once: bool,
    alike: bool,
) -> tuple[dict[str, Tensor], list[Tensor], int, bool]:
    torch.manual_seed(0)
    tables = configs(EmbeddingConfig, "a", _ROWS, _DIM, name="t", feature_names=["a", "b"])
    tables += configs(EmbeddingConfig, "c", _ROWS, _DIM, name="u")
    codecs = None
    if wire == "int8":  # of blocks that are a row; those of files are longer
        codecs = {_SEQUENCES: QuantizedCommCodecs(Int8(_DIM), Int8(_DIM))}
    elif wire != "fp32":
        codecs = wire_codecs(TrainingSpec(wire=wire), None, ())
    sharder = ExactEmbeddingCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
        codecs,
        coalesced=coalesced,
    )
    with nullcontext() if once else all_gradients_sent():
        dmp: Any = shard(EmbeddingCollection(tables=tables), [sharder], sharding)
    outputs, counter = [], CollectiveBytes()
    for step in range(4):
        with counter:
            total = torch.zeros(())
            for number, rows in enumerate(dmp(_features(rank, step)).values()):
                values = rows.values()
                outputs.append(values.detach().clone())
                factors = torch.arange(1.0, values.numel() + 1).view_as(values)
                total = total + ((number + 1) * (values if alike else values * factors)).sum()
            total.backward()
    backward = sum(n for t, n in counter.sent.items() if t.phase == "backward")
    return local_weights(dmp), outputs, backward, dmp.module.dedups_gradients


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_tables_learn_the_same_bit_for_bit(sharding: str, alike: bool) -> None:
    coalesced = ["t", "u"] if alike == (sharding == "table_wise") else []
    _assert_same(sharding, coalesced, "fp32", alike)


@pytest.mark.parametrize(("wire", "saves"), [("fp16", True), ("bf16", True), ("int8", False)])
def test_in_fewer_bits_too(wire: str, saves: bool) -> None:
    once, all_sent = _assert_same("row_wise", [], wire, alike=True)
    assert (once < all_sent) == saves
    assert all_sent < 0.6 * _assert_same("row_wise", [], "fp32", alike=True)[1]


def _assert_same(sharding: str, coalesced: list[str], wire: str, alike: bool) -> tuple[int, int]:
    once, all_sent = (
        run_on_ranks(trained, 2, sharding, coalesced, wire, each, alike, local_world_size=1)
        for each in (True, False)
    )
    for (weights, outputs, _, is_once), (expected, rows, _, is_not) in zip(
        once, all_sent, strict=True
    ):
        assert (is_once, is_not) == (True, False)
        for name, each in expected.items():
            assert torch.equal(weights[name], each)
        assert all(torch.equal(*pair) for pair in zip(outputs, rows, strict=True))
    sent, sent_before = (sum(rank[2] for rank in each) for each in (once, all_sent))
    if alike and wire == "fp32" and not coalesced:
        assert sent < 0.8 * sent_before
    else:  # a number for each message, of each step and sharding
        assert sent <= sent_before + 2 * 4 * 2 * 8
    return sent, sent_before


def test_ranks_that_see_other_nodes_are_refused() -> None:
    told = r"several nodes \(LOCAL_WORLD_SIZE\) is true on rank 0, but false on rank 1"
    with pytest.raises(SetupError, match=told):
        run_on_ranks(_on_other_nodes, 2, local_world_size=1)


def _on_other_nodes(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if rank:
            patched.delenv("LOCAL_WORLD_SIZE")
        trained(rank, world_size, "row_wise", [], "fp32", True, True)


def test_ranks_of_one_node_send_as_before() -> None:
    for found in run_on_ranks(trained, 2, "row_wise", [], "fp32", True, True):
        assert not found[3]


def test_what_is_never_equal_is_seldom_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for compared in run_on_ranks(_compared, 2, 12, local_world_size=1):
        assert compared == [True, False, True, False, False, False, True, *[False] * 5]


def _compared(rank: int, world_size: int, times: int) -> list[bool]:
    class Sequences(torch.nn.Module):
        pass

    once, found = gradient_dedup.DedupGradientAllToAll(Sequences()), []  # type: ignore[arg-type]
    for _ in range(times):
        found.append(once._to_wait == 0)
        rows = torch.randn(8, 4)
        arriving = once.send(rows, [4, 4], [4, 4], dist.group.WORLD)
        arriving.wait()
        own = arriving.received.view(8, 4)[4 * rank : 4 * rank + 4]
        assert torch.equal(own, rows[4 * rank : 4 * rank + 4])
    return found

"""Sharded modules with dynamic tables, compared to fixed tables and to a model of eviction."""

from __future__ import annotations

from collections import ChainMap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tests import sharded
from tests.sharded import everything
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_dynamic.index.mix import bucket_of, mix
from recd_plugin_dynamic.index.policies import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    NoEviction,
    TimeToLive,
)
from recd_plugin_dynamic.runtime.collection import with_dynamic_tables
from recd_plugin_dynamic.runtime.rank_index import Shard
from recd_plugin_dynamic.runtime.sharded import DynamicBagsSharder, DynamicEmbeddingsSharder
from recd_plugin_dynamic.table import DynamicTable
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.runtime.rank_agreement import all_gather_object
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, read_delta
from recd_plugins.training.optimizer import build_optimizer

BUCKETS, CAPACITY, DIM = 4, 24, 4
ROWS = BUCKETS * (CAPACITY + 1)
STEPS, BATCH = 40, 8
KEYS = ["a", "b"]
SGD = TrainingSpec(optimizer="sgd", learning_rate=0.1)
ADAGRAD = TrainingSpec(optimizer="rowwise_adagrad", learning_rate=0.1, eps=0.01)


def kjt(ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, ids, lengths=lengths)


def batches(rank: int, size: int, new: int, steps: int = STEPS) -> list[KeyedJaggedTensor]:
    """Return a rank's part of batches of raw ids. ``new`` ids replace others over the steps."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 2**63 - 1, 40 + new)
    own = []
    for step in range(steps):
        window = ids[step * new // steps : step * new // steps + 40]
        lists = [[draw.choice(window, draw.integers(0, 4)) for _ in range(BATCH)] for _ in KEYS]
        rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        parts = [each for of_key in lists for each in of_key[rows]]
        lengths = torch.tensor([len(each) for each in parts])
        own.append(kjt(torch.from_numpy(np.concatenate(parts)), lengths))
    return own


def tables(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return (sharded.bags if kind == "bags" else sharded.sequences)(*KEYS, rows=ROWS, dim=DIM)


def dynamic(kind: str, policy: Any, training: TrainingSpec) -> Any:
    layout = DynamicTable(BUCKETS, CAPACITY + 1, policy)
    model = with_dynamic_tables(nn.Sequential(tables(kind)), {"t_a": layout, "t_b": layout})
    params = fused_params(training)
    own = [DynamicBagsSharder(params), DynamicEmbeddingsSharder(params)]
    return sharded.shard(model, own, "row_wise")


def values_of(output: Any) -> Tensor:
    output = output.wait() if hasattr(output, "wait") else output
    if isinstance(output, dict):
        return torch.cat([output[key].values() for key in KEYS])
    return output.values()


def step(model: nn.Module, batch: KeyedJaggedTensor) -> Tensor:
    found = values_of(model(batch))
    (found.sin().sum() * dist.get_world_size()).backward()  # TorchRec divides by this number
    return found.detach()


def rows_of_ids(model: Any) -> list[dict[int, int]]:
    """Return a dict from raw id to table row for each table. All ranks must call this."""
    state, found = model.state_dict(), []
    for key in KEYS:
        (shard,) = state[f"0.row_state.t_{key}.ids"].local_shards()
        whole = torch.cat(all_gather_object("reading ids", shard.tensor))
        rows = torch.nonzero(whole >= 0).flatten()
        found.append(dict(zip(whole[rows].tolist(), rows.tolist(), strict=True)))
    return found


class Reference:
    """A dynamic table without sharding: per bucket, the least recently used id is replaced."""

    def __init__(self, table: Tensor, rate: float) -> None:
        self.table, self.rate = table.detach().clone().requires_grad_(), rate
        self.rows = [dict[int, int]() for _ in range(BUCKETS)]
        self.last = [dict[int, int]() for _ in range(BUCKETS)]

    def rows_of(self, ids: NDArray[np.int64], step: int) -> list[int]:
        distinct = np.unique(ids)
        distinct = distinct[np.argsort(mix(distinct))]
        for bucket, (rows, last) in enumerate(zip(self.rows, self.last, strict=True)):
            own = [int(n) for n in distinct if bucket_of(mix(np.array([n])), BUCKETS)[0] == bucket]
            last.update(dict.fromkeys(own, step))
            new = [each for each in own if each not in rows]
            first = bucket * (CAPACITY + 1) + 1
            while len(rows) + len(new) > CAPACITY:
                oldest = min(rows, key=lambda each: (last[each], mix(each)))
                row = rows.pop(oldest)
                shard = Shard(self.table.data.__setitem__, DIM, 0, (-(ROWS**-0.5), ROWS**-0.5))
                shard.reset(torch.tensor([row]), step)
            free = sorted(set(range(first, first + CAPACITY)) - set(rows.values()))
            rows.update(zip(new, free, strict=False))
        whole = ChainMap(*self.rows)
        return [whole[int(each)] for each in ids]

    def step(self, values: Tensor, lengths: Tensor, step: int) -> Tensor:
        rows = torch.tensor(self.rows_of(values.numpy(), step), dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found = nn.functional.embedding_bag(rows, self.table, offsets[:-1], mode="sum")
        found.sin().sum().backward()
        assert self.table.grad is not None
        with torch.no_grad():
            self.table -= self.rate * self.table.grad
        self.table.grad = None
        return found.detach()


def with_a_vocabulary(rank: int, size: int, kind: str) -> None:
    own = batches(rank, size, 10, steps=200)
    model = dynamic(kind, NoEviction(), ADAGRAD)
    outputs = [step(model, batch) for batch in own]
    rows = rows_of_ids(model)
    fixed = sharded.shard(nn.Sequential(tables(kind)), sharded.exact_sharders(ADAGRAD), "row_wise")
    for batch, expected in zip(own, outputs, strict=True):
        parts = [batch[key].values().tolist() for key in KEYS]
        ids = [table[each] for table, part in zip(rows, parts, strict=True) for each in part]
        mapped = kjt(torch.tensor(ids, dtype=torch.int64), batch.lengths())
        assert torch.equal(step(fixed, mapped), expected)
    model.eval()
    assert not values_of(model(kjt(torch.tensor([5, 6]), torch.ones(2).long()))).any()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_without_eviction_it_trains_as_a_table_with_a_vocabulary(size: int, kind: str) -> None:
    run_on_ranks(with_a_vocabulary, size, kind)


def with_eviction(rank: int, size: int) -> None:
    model = dynamic("bags", LeastRecentlyUsed(), SGD)
    first: Any = tables("bags")
    weights = [each.weight for each in first.embedding_bags.values()]
    references = [Reference(each, SGD.learning_rate) for each in weights]
    pairs = zip(batches(rank, size, 200), batches(0, 1, 200), strict=True)
    for number, (own, whole) in enumerate(pairs, 1):
        found = step(model, own)
        expected = [
            each.step(whole[key].values(), whole[key].lengths(), number)
            for key, each in zip(KEYS, references, strict=True)
        ]
        rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        assert torch.allclose(found, torch.cat(expected, 1)[rows], atol=1e-5)
    assert rows_of_ids(model) == [dict(ChainMap(*reference.rows)) for reference in references]
    assert sum(map(len, references[0].last)) > BUCKETS * CAPACITY


@pytest.mark.parametrize("size", [1, 2, 4])
def test_with_eviction_it_trains_as_a_table_in_one_process(size: int) -> None:
    run_on_ranks(with_eviction, size)


def train_from(rank: int, size: int, folder: Path, *, load: bool) -> tuple[Any, Any]:
    """Train to the end, from the middle with ``load``. Save deltas in the first half."""
    model = dynamic("bags", LeastFrequentlyUsed(half_life=20), ADAGRAD)
    optimizer = build_optimizer(model, ADAGRAD)
    checkpoints = Checkpoints(folder, keep=1, full_every=9)
    done = checkpoints.load(model, optimizer).step if load else 0
    assert done == (STEPS // 2 if load else 0)
    outputs = []
    for number, batch in enumerate(batches(rank, size, 200), 1):
        if number > done:
            outputs.append(step(model, batch))
            if number % 5 == 0 and number <= STEPS // 2:
                checkpoints.save(model, optimizer, Progress(number))
    rows = rows_of_ids(model)
    return rows, all_gather_object("comparing", outputs[-STEPS // 2 :])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_delta_resumes_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    rows, outputs = run_on_ranks(partial(train_from, load=False), 2, tmp_path)[0]
    newest = max(tmp_path.glob("step-*"))
    assert any("t_a" in str(pq.read_schema(each).metadata) for each in newest.glob("rows-*"))
    again, resumed = run_on_ranks(partial(train_from, load=True), size, tmp_path)[0]
    assert again == rows
    tolerance = 0.0 if size == 2 else 1e-5
    for own, other in zip(zip(*outputs, strict=True), zip(*resumed, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(own), torch.cat(other), rtol=0, atol=tolerance)


def save_deltas(rank: int, size: int, folder: Path, policy: Any) -> Any:
    """Save deltas after steps that evict ids, and after lookups of unknown ids."""
    model = dynamic("bags", policy, ADAGRAD)
    optimizer = build_optimizer(model, ADAGRAD)
    checkpoints = Checkpoints(folder, keep=9, full_every=9)
    for number, batch in enumerate(batches(rank, size, 200)[:40], 1):
        if number % 3:
            step(model, batch)
        else:  # ids get rows, but no gradient
            values_of(model(batch))
        if number % 8 == 0:
            model.eval()
            values_of(model(kjt(torch.arange(2), torch.ones(2).int())))
            model.train()
            checkpoints.save(model, optimizer, Progress(number))
    assert read_delta(checkpoints.of_step(40)) is not None
    return everything(model, optimizer)


def load_deltas(rank: int, size: int, folder: Path, policy: Any) -> Any:
    model = dynamic("bags", policy, ADAGRAD)
    optimizer = build_optimizer(model, ADAGRAD)
    assert Checkpoints(folder, keep=9).load(model, optimizer).step == 40
    return everything(model, optimizer)


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), TimeToLive(3)])
def test_deltas_have_evicted_rows(policy: Any, tmp_path: Path) -> None:
    expected = run_on_ranks(save_deltas, 2, tmp_path, policy)[0]
    for ranks in (1, 2):
        assert run_on_ranks(load_deltas, ranks, tmp_path, policy)[0] == expected

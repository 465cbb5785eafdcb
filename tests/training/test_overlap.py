"""Pipelines that overlap steps, or look rows of cached tables up ahead."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.training.lookahead_cases import Model as LookaheadModel
from tests.training.lookahead_cases import Pipeline, Run, batch_of, head_of, pipeline_of, run, shard
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding import pipeline as pipeline_module
from recd_plugins.sharding.overlap import DeferredAllReduce
from recd_plugins.sharding.pipeline import OverlappedTrainPipeline, overlaps
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks


def events(rank: int, world_size: int) -> list[str]:
    dmp, optimizer = shard(world_size)
    happened = head_of(dmp).events

    def noted(owner: Any, method: str, name: Callable[..., str]) -> Any:
        original = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            if (event := name(*arguments)) and happened[-1:] != [event]:
                happened.append(event)
            return original(*arguments)

        return mock.patch.object(owner, method, call)

    with (
        noted(DeferredAllReduce, "start", lambda late: "sum" if late._ready else ""),
        noted(pipeline_module._RowsAhead, "look_up", lambda _, context: f"look up {context.index}"),
        noted(optimizer, "step", lambda *_: "optimizer"),
    ):
        pipeline = OverlappedTrainPipeline(dmp, optimizer, DEVICE)
        batches = iter([batch_of(rank, step) for step in range(6)])
        for _ in range(4):
            pipeline.progress(batches)
    return happened


def load_after_a_step(rank: int, world_size: int, batches: int, ended: bool = False) -> None:
    dmp, optimizer = shard(world_size)
    pipeline = OverlappedTrainPipeline(dmp, optimizer, DEVICE)
    pipeline.progress(iter([batch_of(rank, step) for step in range(batches)]))
    if ended:
        del pipeline
        gc.collect()
    dmp.load_state_dict(dmp.state_dict())


def with_a_hook(rank: int, world_size: int, kind: Pipeline) -> tuple[list[float], list[Tensor]]:
    dmp, optimizer = shard(world_size)
    (wrapped,) = (each for each in dmp.children() if isinstance(each, DistributedDataParallel))
    wrapped.register_comm_hook(None, fp16_compress_hook)
    pipeline = pipeline_of(kind, dmp, optimizer)
    batches = iter([batch_of(rank, step) for step in range(5)])
    losses = [float(pipeline.progress(batches)) for _ in range(5)]
    return losses, [each.detach().clone() for each in dmp.parameters()]


class TablesRest(LookaheadModel):
    """Looks up without gradients, as one whose layers alone are trained for some steps."""

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            bags = self.bags(batch.sparse_features)
            sequences = self.sequences(batch.sequence_features)
        tier = self.tiered(batch.replicated_features)["tier"].values()
        loss = self.head(bags["bag"], sequences["sequence"].values(), tier, batch.labels)
        return loss, loss.detach()


def tables_rest(rank: int, world_size: int, kind: Pipeline) -> tuple[list[Tensor], list[Tensor]]:
    dmp, optimizer = shard(world_size)
    dmp.module.__class__ = TablesRest
    before = _tables(dmp)
    pipeline = pipeline_of(kind, dmp, optimizer)
    batches = iter([batch_of(rank, step) for step in range(4)])
    for _ in range(4):
        pipeline.progress(batches)
    return before, _tables(dmp)


def chosen(rank: int, world_size: int, asked: bool | None) -> bool:
    assert not overlaps(nn.Linear(1, 1), DEVICE, True), "there are no rows"
    return overlaps(shard(world_size)[0], DEVICE, asked)


def _tables(dmp: DistributedModelParallel) -> list[Tensor]:
    modules = dmp.module.bags, dmp.module.sequences
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("world_size", "rates", "fails"),
    [(1, (), None), (3, (), None), (2, (0.2, 0.05), None), (2, (0.1,), None)]
    + [(2, (), fails) for fails in ("forward 3", "backward 3", "forward 0")],
)
def test_it_trains_as_a_loop(world_size: int, rates: tuple[float, ...], fails: str | None) -> None:
    kinds: tuple[Pipeline, ...] = ("ours", "overlapped")
    variants: list[list[Run]] = [
        run_on_ranks(run, world_size, kind, None, fails, False, rates) for kind in kinds
    ]
    for waits, late in zip(*variants, strict=True):
        pipelines = (waits.pipeline, late.pipeline)
        assert pipelines == ("SparseDistTrainPipeline", "OverlappedTrainPipeline")
        assert late.losses == waits.losses
        assert len(waits.losses) == (7 if fails else 8)
        for name, values in waits.state.items():
            assert torch.equal(values, late.state[name]), name


def test_dense_gradients_are_summed_while_the_next_rows_are_looked_up() -> None:
    happened = run_on_ranks(events, 2)[0]
    step = happened[happened.index("forward 1") : happened.index("forward 2")]
    assert step == ["forward 1", "backward 1", "sum", "look up 2", "optimizer"]


def test_a_hook_of_the_trainers_own_stays() -> None:
    ours, overlapped = (run_on_ranks(with_a_hook, 2, kind) for kind in ("ours", "overlapped"))
    for (losses, weights), (others, theirs) in zip(ours, overlapped, strict=True):
        assert losses == others
        assert all(map(torch.equal, weights, theirs))


@pytest.mark.parametrize("kind", ["ours", "overlapped"])
def test_tables_that_are_looked_up_without_gradients_do_not_learn(kind: Pipeline) -> None:
    ((before, after),) = run_on_ranks(tables_rest, 1, kind)
    assert before
    assert all(map(torch.equal, before, after))


def test_weights_that_come_too_late_are_refused() -> None:
    run_on_ranks(load_after_a_step, 2, 1)
    message = r"loaded weights while rows .*training\.overlap: false"
    with pytest.raises(ExactnessError, match=message):
        run_on_ranks(load_after_a_step, 2, 2)
    run_on_ranks(load_after_a_step, 2, 2, True)


@pytest.mark.parametrize(
    ("asked", "nodes", "expected"),
    [(None, 1, False), (None, 2, DEVICE.type == "cpu"), (False, 2, False), (True, 1, True)],
)
def test_it_is_for_several_nodes(asked: bool | None, nodes: int, expected: bool) -> None:
    assert run_on_ranks(chosen, 2, asked, local_world_size=2 // nodes) == [expected] * 2


HOT = np.arange(8, dtype=np.int64)
AHEAD = TableCache("static", 8 / 64, HOT)
NOT_AHEAD = TableCache("static", 8 / 64, HOT, lookahead=False)


@pytest.mark.parametrize(("world_size", "kind"), [(1, "none"), (2, "ours"), (2, "stock")])
def test_every_pipeline_trains_as_plain_tables(world_size: int, kind: Pipeline) -> None:
    expected = run_on_ranks(run, world_size, "none", None)
    for cache in (AHEAD, NOT_AHEAD):
        for plain, cached in zip(expected, run_on_ranks(run, world_size, kind, cache), strict=True):
            _assert_near(plain, cached)
            if kind == "ours":
                ahead = "Lookahead" if cache is AHEAD else "SparseDist"
                assert cached.pipeline == f"{ahead}TrainPipeline"


def test_a_rank_without_a_cached_table_looks_ahead_with_the_others() -> None:
    expected, cached = (
        run_on_ranks(run, 2, kind, cache, None, True)
        for kind, cache in (("none", None), ("ours", AHEAD))
    )
    for one, other in zip(expected, cached, strict=True):
        _assert_near(one, other)
        assert other.pipeline == "LookaheadTrainPipeline"


@pytest.mark.parametrize(
    ("cache", "fails"),
    [(AHEAD, "forward 3"), (AHEAD, "forward 0"), (NOT_AHEAD, "backward 3")],
    ids=["forward", "first", "backward"],
)
def test_training_with_a_cache_goes_on_after_a_failed_step(cache: TableCache, fails: str) -> None:
    expected = run_on_ranks(run, 2, "ours", None, fails)
    for plain, cached in zip(expected, run_on_ranks(run, 2, "ours", cache, fails), strict=True):
        assert len(plain.losses) == 7
        _assert_near(plain, cached)


# Sums of gradients are in any order on a GPU.
TOLERANCE = 1e-6 if DEVICE.type == "cuda" else 0.0


def _assert_near(plain: Run, cached: Run) -> None:
    assert np.allclose(plain.losses, cached.losses, rtol=0, atol=TOLERANCE)
    assert plain.state.keys() == cached.state.keys()
    for name, values in plain.state.items():
        assert torch.allclose(values, cached.state[name], rtol=0, atol=TOLERANCE), name
    assert cached.num_pinned == 0

"""What an overlapped pipeline does when, and where it is taken."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tests.training.lookahead_cases import Model as LookaheadModel
from tests.training.lookahead_cases import Pipeline, batch_of, head_of, pipeline_of, shard
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.sharding import pipeline as pipelines
from recd_plugins.sharding.overlap import DeferredAllReduce
from recd_plugins.sharding.pipeline import OverlappedTrainPipeline, overlaps
from recd_plugins.testing.device import DEVICE


def events(rank: int, world_size: int) -> list[str]:
    """What happens in four steps."""
    dmp, optimizer = shard(world_size, None, DEVICE)
    happened = head_of(dmp).events
    with _noted(happened, dmp, optimizer):
        pipeline = OverlappedTrainPipeline(dmp, optimizer, DEVICE)
        batches = iter([batch_of(rank, step) for step in range(6)])
        for _ in range(4):
            pipeline.progress(batches)
    return happened


def load_after_a_step(rank: int, world_size: int, batches_left: int) -> None:
    """Weights are loaded when so many batches are left."""
    dmp, optimizer = shard(world_size, None, DEVICE)
    pipeline = OverlappedTrainPipeline(dmp, optimizer, DEVICE)
    pipeline.progress(iter([batch_of(rank, step) for step in range(1 + batches_left)]))
    dmp.load_state_dict(dmp.state_dict())


def load_after_a_pipeline(rank: int, world_size: int) -> None:
    """Weights are loaded when who trained has let go of a pipeline that had batches left."""
    dmp, optimizer = shard(world_size, None, DEVICE)
    pipeline = OverlappedTrainPipeline(dmp, optimizer, DEVICE)
    pipeline.progress(iter([batch_of(rank, step) for step in range(2)]))
    del pipeline
    gc.collect()
    dmp.load_state_dict(dmp.state_dict())


def with_a_hook(rank: int, world_size: int, kind: Pipeline) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of a trainer whose DistributedDataParallel has a hook of its own."""
    dmp, optimizer = shard(world_size, None, DEVICE)
    (wrapped,) = (each for each in dmp.children() if isinstance(each, DistributedDataParallel))
    wrapped.register_comm_hook(None, fp16_compress_hook)
    pipeline = pipeline_of(kind, dmp, optimizer, DEVICE)
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
    """Tables before four steps and after them."""
    dmp, optimizer = shard(world_size, None, DEVICE)
    dmp.module.__class__ = TablesRest
    before = _tables(dmp)
    pipeline = pipeline_of(kind, dmp, optimizer, DEVICE)
    batches = iter([batch_of(rank, step) for step in range(4)])
    for _ in range(4):
        pipeline.progress(batches)
    return before, _tables(dmp)


def chosen(rank: int, world_size: int, asked: bool | None) -> bool:
    """Whether ranks overlap where ``training.overlap`` says this."""
    assert not overlaps(nn.Linear(1, 1), DEVICE, True), "there are no rows"
    dmp, _ = shard(world_size, None, DEVICE)
    return overlaps(dmp, DEVICE, asked)


@contextmanager
def _noted(
    happened: list[str], dmp: DistributedModelParallel, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    before = _tables(dmp)
    forward = pipelines._RowsAhead
    pipeline = OverlappedTrainPipeline

    def note(event: str) -> None:
        nonlocal before
        now = _tables(dmp)
        if not all(torch.equal(a, b) for a, b in zip(before, now, strict=True)):
            happened.append("tables have learned")
        before = now
        if happened[-1:] != [event]:  # of one module after another
            happened.append(event)

    def start(late: DeferredAllReduce) -> None:
        if late._ready:
            note("sum")
        original_start(late)

    def look_up(ahead: Any, context: Any) -> None:
        note(f"look up {context.index}")
        original_look_up(ahead, context)

    def send(self: OverlappedTrainPipeline, batch: Any, context: Any) -> None:
        note(f"{'ids' if context.has_sizes else 'sizes of ids'} {context.index}")
        original_send(self, batch, context)

    def step(*arguments: Any) -> None:
        note("optimizer")
        original_step(*arguments)

    original_start, original_look_up = DeferredAllReduce.start, forward.look_up
    original_send, original_step = pipeline.start_sparse_data_dist, optimizer.step
    with (
        mock.patch.object(DeferredAllReduce, "start", start),
        mock.patch.object(forward, "look_up", look_up),
        mock.patch.object(pipeline, "start_sparse_data_dist", send),
        mock.patch.object(optimizer, "step", step),
    ):
        yield


def _tables(dmp: DistributedModelParallel) -> list[Tensor]:
    """Local rows of the tables whose kernels learn in the backward pass."""
    modules = dmp.module.bags, dmp.module.sequences
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]

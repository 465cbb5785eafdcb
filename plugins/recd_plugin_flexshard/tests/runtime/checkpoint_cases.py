"""Training that stops, moves by a checkpoint, and goes on; what one rank sees of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recd_plugin_flexshard.runtime import RowTiers
from recd_plugin_flexshard.tests.runtime.state_model import (
    TIERS,
    Job,
    Model,
    Optimizer,
    build_collection,
    largest_difference,
    make_batch,
    training_spec,
)
from recd_plugins.runtime.errors import RecdError

STEPS = 3


@dataclass(frozen=True)
class Continued:
    """How far a training that went on differs from one that never stopped; and what it loaded."""

    loss: float
    everything: float
    loaded: float


@dataclass(frozen=True)
class Plain:
    """An uninterrupted training without tiers: losses, and its state half way and at last."""

    losses: list[Tensor]
    half_way: dict[str, Tensor]
    last: dict[str, Tensor]


def train_and_save(
    rank: int,
    world_size: int,
    optimizer: Optimizer,
    tiers: Mapping[str, RowTiers] | None,
    folder: Path,
    pipelined: bool = False,
) -> None:
    assert world_size == dist.get_world_size()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    job = Job(optimizer, tiers)
    job.train(range(STEPS), pipelined=pipelined)
    job.save(folder, STEPS)


def train_plainly(rank: int, world_size: int, optimizer: Optimizer) -> Plain:
    job = Job(optimizer, None)
    losses = job.train(range(STEPS))
    half_way = job.everything()
    losses += job.train(range(STEPS, 2 * STEPS))
    return Plain(_of_all_ranks(losses), half_way, job.everything())


def load_and_go_on(
    rank: int,
    world_size: int,
    optimizer: Optimizer,
    tiers: Mapping[str, RowTiers] | None,
    folder: Path,
    plain: Plain,
) -> Continued:
    job = Job(optimizer, tiers)
    job.train(range(40, 42))  # what a checkpoint finds is to make no difference
    assert job.load(folder) == STEPS
    loaded = largest_difference(job.everything(), plain.half_way)
    losses = _of_all_ranks(job.train(range(STEPS, 2 * STEPS), pipelined=True))
    want = plain.losses[STEPS:]
    return Continued(
        loss=max(float((a - b).abs()) for a, b in zip(losses, want, strict=True)),
        everything=largest_difference(job.everything(), plain.last),
        loaded=loaded,
    )


def _of_all_ranks(losses: list[Tensor]) -> list[Tensor]:
    """The loss of the global batch, in each step."""
    stacked = torch.stack(losses).double()
    dist.all_reduce(stacked)
    return list((stacked / dist.get_world_size()).unbind())


def go_on_unsharded(folder: Path, plain: Plain) -> tuple[float, float]:
    """In one process, with SGD of torch: differences of weights as loaded, and in the end."""
    model = Model(build_collection({"a": 40, "b": 23, "c": 9}))
    state = {"model": model.state_dict()}
    load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    loaded = _difference(model, plain.half_way)
    rate = training_spec("sgd").learning_rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS, 2 * STEPS):
        optimizer.zero_grad()
        model(make_batch(0, 1, step))[0].backward()
        optimizer.step()
    return loaded, _difference(model, plain.last)


def _difference(model: Model, want: Mapping[str, Tensor]) -> float:
    return max(
        float((value - want[f"model/{name}"]).abs().max())
        for name, value in model.state_dict().items()
    )


def stop_in_between(
    rank: int, world_size: int, optimizer: Optimizer, pipelined: bool
) -> dict[str, float]:
    """Differences that reading, and loading back, the state of a training makes to it."""
    undisturbed, read, loaded = (Job(optimizer, TIERS) for _ in range(3))
    want = undisturbed.train(range(2 * STEPS), pipelined=pipelined)
    losses: dict[str, list[Tensor]] = {"read": [], "loaded": []}
    for step in range(2 * STEPS):
        losses["read"] += read.train(range(step, step + 1), pipelined=pipelined)
        read.everything()
        losses["loaded"] += loaded.train(range(step, step + 1), pipelined=pipelined)
        state = {"model": loaded.dmp.state_dict(), "optimizer": loaded.optimizer.state_dict()}
        if step % 2:
            loaded.optimizer.load_state_dict(state["optimizer"])
        loaded.dmp.load_state_dict(state["model"])
    last = undisturbed.everything()
    return {
        "loss, read": max(map(_distance, losses["read"], want)),
        "loss, loaded": max(map(_distance, losses["loaded"], want)),
        "state, read": largest_difference(read.everything(), last),
        "state, loaded": largest_difference(loaded.everything(), last),
    }


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs())


def load_parts(rank: int, world_size: int, optimizer: Optimizer) -> list[str]:
    """Load weights alone, or state alone, in both orders; what differs from a plain job's."""
    wrong = []
    for order in (["weights"], ["state"], ["weights", "state"], ["state", "weights"]):
        results = []
        for tiers in (TIERS, None):
            source, target = Job(optimizer, tiers), Job(optimizer, tiers)
            source.train(range(2))
            target.train(range(5, 8))
            for part in order:
                if part == "weights":
                    target.dmp.load_state_dict(source.dmp.state_dict())
                else:
                    target.optimizer.load_state_dict(source.optimizer.state_dict())
            target.train(range(2, 4))
            results.append(target.everything())
        if largest_difference(*results) > 1e-6:
            wrong.append(" then ".join(order))
    return wrong


def go_back_to_a_copy(rank: int, world_size: int, optimizer: Optimizer) -> float:
    """Difference to what a state was when it was copied in memory, after it was loaded again."""
    job = Job(optimizer, TIERS)
    job.train(range(2))
    kept = copy.deepcopy((job.dmp.state_dict(), job.optimizer.state_dict()))
    want = job.everything()
    job.train(range(2, 4))
    assert largest_difference(job.everything(), want) > 0
    job.dmp.load_state_dict(kept[0])
    job.optimizer.load_state_dict(kept[1])
    return largest_difference(job.everything(), want)


def fill_in_place(rank: int, world_size: int, part: str, folder: Path) -> float:
    """A part of a state that is written into a fresh state dict, and loaded no further."""
    results = []
    for number, tiers in enumerate((TIERS, None)):
        source, target = Job("rowwise_adagrad", tiers), Job("rowwise_adagrad", tiers)
        source.train(range(2))
        target.train(range(5, 8))
        checkpoint = folder / str(number)
        save({part: _parts(source)[part]()}, checkpoint_id=checkpoint)
        load({part: _parts(target)[part]()}, checkpoint_id=checkpoint)
        target.train(range(2, 4))
        results.append(target.everything())
    return largest_difference(*results)


def fill_after_an_evaluation(rank: int, world_size: int, part: str) -> float:
    """As ``fill_in_place``, of a state dict that a forward pass and another dict came after."""
    results = []
    for tiers in (TIERS, None):
        job = Job("rowwise_adagrad", tiers)
        held = _parts(job)[part]()
        job.train(range(2))
        job.everything()
        job.evaluate(7)
        job.evaluate(8)
        for each in _tensors(held):
            for shard in each.local_shards():
                shard.tensor.detach().fill_(0.25)
        job.train(range(2, 4))
        results.append(job.everything())
    return largest_difference(*results)


def use_a_state_dict_of_before(rank: int, world_size: int, part: str, folder: Path) -> list[str]:
    """What is said of one that was taken before training, by each of its uses."""
    job = Job("rowwise_adagrad", TIERS)
    held = _parts(job)[part]()
    save({part: held}, checkpoint_id=folder)
    before = job.everything()
    job.train(range(2))
    uses: list[Callable[[], object]] = [
        lambda: save({part: held}, checkpoint_id=folder / "again"),
        lambda: load({part: held}, checkpoint_id=folder),
        lambda: [each.local_shards() for each in _tensors(held)],
        lambda: torch.save(_tensors(held), BytesIO()),
    ]
    if part == "weights":
        uses.append(lambda: job.dmp.load_state_dict(dict(held)))
    said = []
    for use in uses:
        try:
            use()
            said.append("")
        except (RecdError, CheckpointException) as error:
            said.append(str(error))
    _parts(job)[part]()
    load({part: held}, checkpoint_id=folder)
    name = "model/" if part == "weights" else "optimizer/sequences"
    after = job.everything()
    loaded = [key for key in before if key.startswith(name) and "head" not in key]
    assert all(after[key].equal(before[key]) for key in loaded), loaded
    return said


def _tensors(state: dict[str, Any]) -> list[ShardedTensor]:
    of_tables = state.get("state", {"": state}).values()
    return [t for each in of_tables for t in each.values() if isinstance(t, ShardedTensor)]


def _parts(job: Job) -> dict[str, Callable[[], dict[str, Any]]]:
    return {"weights": job.dmp.state_dict, "state": job.optimizer.state_dict}

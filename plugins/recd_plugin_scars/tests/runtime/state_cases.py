"""Checkpoints of cached and of plain tables, on one rank."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.parity_model import make_batch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.types import ShardedModule

from recd_plugin_scars.runtime.stores import BackingStore, FileStore
from recd_plugin_scars.tests.runtime.matrix_cases import (
    PARTS,
    Case,
    Training,
    local_state,
    shard,
)
from recd_plugins.data.lower import lower
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.testing.device import DEVICE
from recd_plugins.training import checkpoint
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress

NUM_BATCHES = 8
# Steps before a checkpoint and after it.
STEPS = 3


@dataclass(frozen=True)
class Run:
    """What steps gave on one rank."""

    losses: list[float]
    state: dict[str, Tensor]


class Trainer:
    """Trains on endless data, so that batches are in flight whenever it pauses."""

    def __init__(
        self, rank: int, world_size: int, training: Training, case: Case | None, folder: Path
    ) -> None:
        self._rank, self._training = rank, training
        self.dmp, self.optimizer = shard(
            training, world_size, {} if case is None else case.caches(folder)
        )

    def start(self, step: int = 0) -> None:
        """With the batch of a step."""
        self._pipeline = build_train_pipeline(self.dmp, self.optimizer, DEVICE)
        self._batches = self._endless(step)

    def steps(self, number: int = STEPS) -> list[float]:
        return [float(self._pipeline.progress(self._batches)[0]) for _ in range(number)]

    def run(self) -> Run:
        return Run(self.steps(), self.state())

    def state(self) -> dict[str, Tensor]:
        return local_state(self.dmp, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.dmp.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.dmp.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _endless(self, step: int) -> Iterator[ModelInput]:
        while True:
            batch = make_batch(self._rank, step % NUM_BATCHES, form=self._training.form)
            yield lower(batch, PARTS.placement)
            step += 1


def save(rank: int, world_size: int, case: Case, folder: Path) -> list[Run]:
    """Train plain and cached tables and leave a checkpoint of each."""
    runs = []
    for kind, own in (("plain", None), ("cached", case)):
        trainer = Trainer(rank, world_size, case.training, own, folder / "rows before")
        trainer.start()
        runs.append(trainer.run())
        if rank == 0:
            (folder / kind).mkdir()
        dist.barrier()
        Checkpoints(folder / kind, keep=1).save(trainer.dmp, trainer.optimizer, Progress(STEPS))
    return runs


def resume(rank: int, world_size: int, case: Case, folder: Path) -> list[Run]:
    """Go on with plain and cached tables from the checkpoint of each."""
    runs = []
    for kind in ("plain", "cached"):
        for own in (None, case):
            trainer = Trainer(rank, world_size, case.training, own, folder / f"rows after {kind}")
            # With batches in flight, whose rows are not those of the checkpoint.
            trainer.start()
            trainer.steps(1)
            Checkpoints(folder / kind, keep=1).load(trainer.dmp, trainer.optimizer)
            trainer.start(STEPS)
            runs.append(trainer.run())
    return runs


def round_trip(rank: int, world_size: int, case: Case) -> list[list[Run]]:
    """Stock to cached to stock by state dicts, each followed by steps of giver and taker."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            Trainer(rank, world_size, case.training, own, Path(folder))
            for own in (None, case, None)
        ]
        for step, trainer in enumerate(trainers):
            trainer.start(step)
            trainer.steps(1 + step)  # batches are in flight when others' rows come
        runs = []
        for giver, taker in pairwise(trainers):
            taker.load(copy.deepcopy(giver.state_dict()))
            for trainer in (giver, taker):
                trainer.start()
            runs.append([giver.run(), taker.run()])
        return runs


def fill_in_place(rank: int, world_size: int, case: Case) -> list[Run]:
    """What another one has learned is written into the tensors of a state dict, and no more."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Trainer(rank, world_size, case.training, None, Path(folder))
        cached = Trainer(rank, world_size, case.training, case, Path(folder))
        runs = []
        for trainer in (plain, cached):
            trainer.start()
            trainer.steps(2)
            for value in [*_tensors(trainer.state_dict())]:
                value.mul_(0.5)
            runs.append(trainer.run())
        return runs


def keep_a_state_dict(rank: int, world_size: int, case: Case) -> list[Run]:
    """One that was taken before training is read, pickled and filled later on."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for own in (None, case):
            trainer = Trainer(rank, world_size, case.training, own, Path(folder))
            held = trainer.state_dict()
            trainer.start()
            losses = trainer.steps()
            pickled = BytesIO()
            torch.save(held, pickled)
            assert b"AskedShardedTensor" not in pickled.getvalue()
            read = [value.cpu().clone() for value in _tensors(held)]
            losses += trainer.steps()
            pickled.seek(0)
            for value, now in zip(
                _tensors(torch.load(pickled, weights_only=False)), _tensors(held), strict=True
            ):
                now.copy_(value)
            losses += trainer.steps()
            state = trainer.state() | {str(place): value for place, value in enumerate(read)}
            runs.append(Run(losses, state))
        return runs


def load_a_part(rank: int, world_size: int, case: Case) -> list[Run]:
    """A state dict without one of the tables is loaded, of plain and of cached tables."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for own in (None, case):
            trainer = Trainer(rank, world_size, case.training, own, Path(folder))
            trainer.start()
            trainer.steps()
            before = copy.deepcopy(trainer.dmp.state_dict())
            trainer.steps()
            part = {name: value for name, value in before.items() if ".b1." not in name}
            trainer.dmp.load_state_dict(part, strict=False)
            runs.append(trainer.run())
        return runs


def reset(rank: int, world_size: int, case: Case) -> list[Run]:
    """Tables get new first values after some steps, plain and cached ones."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for own in (None, case):
            trainer = Trainer(rank, world_size, case.training, own, Path(folder))
            trainer.start()
            trainer.steps()
            torch.manual_seed(rank)
            for module in trainer.dmp.modules():
                if isinstance(module, ShardedModule):
                    module.reset_parameters()
            runs.append(trainer.run())
        return runs


def convert(rank: int, world_size: int, case: Case) -> dict[str, tuple[torch.dtype, bool]]:
    """A model goes to another dtype, as others go to a device: parameters, and where they are."""
    with tempfile.TemporaryDirectory() as folder:
        dmp = Trainer(rank, world_size, case.training, case, Path(folder)).dmp
        before = {name: each.data_ptr() for name, each in dmp.named_parameters()}
        dmp.double()
        return {
            name: (each.dtype, each.data_ptr() == before[name])
            for name, each in dmp.named_parameters()
        }


def _tensors(value: Any) -> Iterator[Tensor]:
    """The local tensors of a state dict."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.tensor.detach()
    elif isinstance(value, Tensor):
        yield value.detach()


@dataclass(frozen=True)
class Named:
    """What TorchRec shows of a model's tables."""

    weights: dict[str, Any]
    parameters: list[tuple[str, tuple[int, ...]]]
    optimizer: dict[str, Any]
    first_weights: dict[str, Tensor]


def names(rank: int, world_size: int, case: Case) -> list[Named]:
    """Of plain and of cached tables."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for caches in ({}, case.caches(Path(folder))):
            torch.manual_seed(7)
            dmp, optimizer = shard(case.training, world_size, caches, with_weights=False)
            state = dmp.state_dict()
            found.append(
                Named(
                    {name: _shape(value) for name, value in state.items()},
                    [(name, tuple(each.shape)) for name, each in dmp.named_parameters()],
                    {
                        name: {key: _shape(value) for key, value in values.items()}
                        for name, values in optimizer.state_dict()["state"].items()
                    },
                    {
                        f"{name}/{number}": tensor.cpu().clone()
                        for name, value in state.items()
                        for number, tensor in enumerate(_tensors(value))
                    },
                )
            )
        return found


def _shape(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return type(value).__name__, tuple(getattr(value, "shape", ()))
    metadata = value.metadata()
    # Beside a GPU stock tables are in its memory, cached ones in that of the host.
    on_cpu = DEVICE.type == "cpu"
    shards = [
        (
            tuple(each.shard_offsets),
            tuple(each.shard_sizes),
            str(each.placement) if on_cpu else each.placement.rank(),
        )
        for each in metadata.shards_metadata
    ]
    return tuple(metadata.size), str(metadata.tensor_properties.dtype), sorted(shards)


def train_to_the_end(
    rank: int, world_size: int, case: Case, folder: Path, die_at: str | None
) -> tuple[int, list[float]]:
    """Ten steps with a checkpoint every third: where this run began, and its losses."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    with checkpoints.reserve(resume=True) if rank == 0 else nullcontext():
        dist.barrier()
        trainer = Trainer(rank, world_size, case.training, case, folder / "rows")
        first = checkpoints.load(trainer.dmp, trainer.optimizer).step
        losses = []
        trainer.start(first)
        for step in range(first + 1, 11):
            if step == 8 and die_at is not None and rank == world_size - 1:
                _die_at(die_at)
            losses += trainer.steps(1)
            if step % 3 == 0:
                checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
    return first, losses


def _die_at(moment: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "between gather and write-back":
        for store in (BackingStore, FileStore):
            store.write = die  # type: ignore[method-assign]
    elif moment == "in the middle of a write-back":
        for store in (BackingStore, FileStore):
            store.write = _half_a_write(store.write)  # type: ignore[method-assign]
    elif moment == "while rows are gathered":
        for store in (BackingStore, FileStore):
            store.read = die  # type: ignore[method-assign]
    elif moment == "while a checkpoint is written":
        checkpoint.save = die


def _half_a_write(write: Any) -> Any:
    def half(store: Any, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
        number = (len(rows) + 1) // 2
        write(store, rows[:number], weights[:number], None if state is None else state[:number])
        os.kill(os.getpid(), signal.SIGKILL)

    return half

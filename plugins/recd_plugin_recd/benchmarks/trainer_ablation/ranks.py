"""What each rank does: all variants of one model, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recd_plugin_recd.benchmarks.trainer_ablation.one_trainer import OneTrainer
from recd_plugin_recd.benchmarks.trainer_ablation.variants import Variant
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.planning import Stage, StageTimes
from recd_plugins.api.registry import load_registry
from recd_plugins.api.training import sum_by_kind
from recd_plugins.testing.benchmark import keep_freed_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is measured; travels to the ranks by pickle.

    Attributes:
        registries: the model's registry file by layout of its table.
        variants: all of one model.
        num_batches: batches of a rank that go round; fewer of a variant with larger ones.
        turns: turns of each variant; one more warms up.
        steps: timed steps of a turn; one more before them warms up.
        profiled: turns in which each variant is profiled.
        device: ``cpu`` or ``cuda``.
    """

    registries: Mapping[str, Path]
    variants: tuple[Variant, ...]
    num_batches: int
    turns: int
    steps: int
    profiled: int
    device: str = "cpu"


@dataclass
class Measured:
    """One variant, over all ranks.

    Attributes:
        batch_size: rows of a step of one rank.
        seconds: wall time of a step, by turn.
        num_batches: that go round, of one rank.
        losses: by step, the mean over ranks.
        bytes_by_kind: bytes sent in a step, all ranks.
        ids: ids looked up in a step by feature, all ranks.
        sent: bytes that the features make all ranks send in a step, see ``OneTrainer.sent_bytes``.
        stages: seconds of a step, the mean over ranks.
        pooling: sequence pooling's share of the stages gemm and other, likewise.
        static_bytes: parameters and optimizer state, of the rank that has most.
        peak_bytes: the most that a step has above them, of the rank that needs most.
        mean_bytes: what a step has above them on average, of that rank.
        failure: why it could not be trained; nothing else is known then.
    """

    batch_size: int = 0
    seconds: list[float] = field(default_factory=list)
    num_batches: int = 0
    losses: list[float] = field(default_factory=list)
    bytes_by_kind: dict[str, float] = field(default_factory=dict)
    ids: dict[str, float] = field(default_factory=dict)
    sent: float = 0
    stages: StageTimes | None = None
    pooling: dict[Stage, float] = field(default_factory=dict)
    static_bytes: float = 0
    peak_bytes: float = 0
    mean_bytes: float = 0
    failure: str | None = None


def measure(rank: int, world_size: int, job: Job) -> dict[str, Measured]:  # noqa: ARG001
    """Everything about the variants of a job, by name. A collective call."""
    silence_upstream()
    # Or each large tensor is memory that the system clears page by page, above all the baseline's.
    keep_freed_memory()
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device(job.device)
    trainers: dict[str, OneTrainer] = {}
    result: dict[str, Measured] = {}
    for variant in job.variants:
        trainer, failure = _try(variant, job, device)
        result[variant.name] = Measured(failure=failure)
        if trainer is not None:
            trainers[variant.name] = trainer
    # Everything that is there stays: collecting garbage need not go through it.
    gc.collect()
    gc.freeze()
    for name, trainer in trainers.items():
        found = result[name]
        found.batch_size, found.num_batches = trainer.batch_size, len(trainer.batches)
        by_kind, ids = zip(*_from_every_rank(trainer.counts()), strict=True)
        found.bytes_by_kind, found.ids = sum_by_kind(list(by_kind)), sum_by_kind(list(ids))
        found.sent = sum(_from_every_rank(trainer.sent_bytes()))
    for turn in range(job.turns + 1):
        for name, trainer in trainers.items():
            spent = _turn(trainer, job.steps)
            if turn:
                result[name].seconds.append(spent)
    for _ in range(job.profiled):
        for trainer in trainers.values():
            trainer.profile()
    for name, trainer in trainers.items():
        _read_profile(trainer, result[name])
        result[name].losses = trainer.losses()
    return result


def _try(variant: Variant, job: Job, device: torch.device) -> tuple[OneTrainer | None, str | None]:
    """A trainer that has made a step; or None and, of TorchRec's index dedup, what it lacks."""
    # RecD is what is taken apart: nothing of what else auto may choose.
    registry = load_registry(job.registries[variant.layout], sharding="torchrec.planner")
    trainer = OneTrainer(registry, variant, device, job.num_batches)
    try:
        trainer.steps(1)
    except NotImplementedError as error:
        if variant.sharders != "index_dedup":
            raise
        return None, str(error).partition(".")[0]
    return trainer, None


def _turn(trainer: OneTrainer, steps: int) -> float:
    """Seconds a step, the same on every rank."""
    trainer.steps(1)
    dist.barrier()
    start = time.perf_counter()
    trainer.steps(steps)
    dist.barrier()
    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent) / steps


def _read_profile(trainer: OneTrainer, found: Measured) -> None:
    """Stages and memory, into ``found``."""
    profile = trainer.profiled
    found.stages = StageTimes.mean(_from_every_rank(profile.stages()))
    shares = [share for rank in _from_every_rank(trainer.pooling_shares) for share in rank]
    found.pooling = {stage: sum(s[stage] for s in shares) / len(shares) for stage in shares[0]}
    memory = _from_every_rank((trainer.static_bytes(), profile.memory()))
    found.static_bytes, of_step = max(memory, key=lambda each: each[0] + each[1].peak)
    found.peak_bytes, found.mean_bytes = of_step.peak, of_step.mean


def _from_every_rank(value: T) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone

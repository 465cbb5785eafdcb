"""Runs jobs on ranks: processes of its own, or those that torchrun started."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recd_plugins.config import RunConfig
from recd_plugins.config.device import choose_device
from recd_plugins.config.from_file import load_registry
from recd_plugins.config.run_config import check_dataset
from recd_plugins.data.loader import check_ingestion
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.planning.topologies import TopologySpec, machine_of
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import RecdError, SetupError
from recd_plugins.runtime.launch import (
    backend_for,
    join_torchrun,
    launch,
    torchrun_rank,
    torchrun_ranks_per_node,
)
from recd_plugins.runtime.rank_agreement import check_started_alike
from recd_plugins.runtime.signals import passed_on
from recd_plugins.runtime.watch import HangLimits, watched_by_each_other
from recd_plugins.training.assembly import Variant
from recd_plugins.training.evaluation import check_evaluation, splits_of
from recd_plugins.training.measured_at_start import refuse_existing, topology_at_start
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, checkpoints_of, train


@dataclass(frozen=True)
class Session:
    """Trains on prepared data, any number of times."""

    registry: RunConfig
    job: Job
    rank: int
    world_size: int
    ranks_per_node: int
    hang_limits: HangLimits

    def train(self, side: Variant, sharding: str | None = None) -> Result:
        """Train on all ranks, in new processes; under torchrun in those that are there."""
        job = replace(self.job, side=side, sharding=sharding or self.job.sharding)
        if dist.is_initialized():
            return train(self.rank, self.world_size, job)
        return launch(
            train,
            self.world_size,
            job,
            backend=backend_for(job.device),
            local_world_size=self.ranks_per_node,
            hang_limits=self.hang_limits,
            timeout=self.hang_limits.collectives,
            interruptible=True,
        )[0]


@contextmanager
def session(
    path: Path,
    registry: RunConfig | None = None,
    *,
    plugins_dir: Path | None = None,
    overrides: Mapping[str, Any],
    resume: bool = False,
    breakdown: bool = False,
    shardings: Sequence[str] = (),
    allowed: Sequence[str] = (),
    settings: Sequence[str] = (),
    log_every: float | None = None,
    alike: Mapping[str, Any] | None = None,
) -> Iterator[Session]:
    """Check a registry, join the ranks of torchrun if there are any, and prepare the data once.

    Args:
        path: the registry file.
        registry: the file, loaded with the first of ``shardings`` and the ``settings``.
        plugins_dir: a folder of plugin files.
        overrides: fields of its ``training:`` section to set.
        resume: go on from the newest checkpoint, or from the start if there is none yet.
        breakdown: profile some steps of every run.
        shardings: plugins in place of the first sharding entry's, as ``load_registry`` takes one;
            a run has the first of them unless it names another.
        allowed: fields in which the run may differ from the one that wrote the checkpoint.
        settings: values in place of the file's, as ``load_registry`` takes them.
        log_every: seconds between progress lines.
        alike: what else all ranks of torchrun have to be asked for, by option.

    Raises:
        RecdError: the registry, the machine or the data is not as it should be.
    """
    first = shardings[0] if shardings else None
    if registry is None:
        registry = load_registry(path, plugins_dir=plugins_dir, sharding=first, settings=settings)
    registry = registry.with_training(overrides)
    device = choose_device(registry)
    check_ingestion(registry)
    check_evaluation(registry)
    job = Job(
        path,
        plugins_dir=plugins_dir,
        overrides=dict(overrides),
        device=device,
        breakdown=breakdown,
        sharding=first,
        allowed=tuple(allowed),
        settings=tuple(settings),
        log_every=log_every,
        text=registry.text,
    )
    training = registry.training
    limits = hang_limits(registry)
    if torchrun_rank() is None:
        ranks_per_node = training.ranks_per_node or training.ranks
        if training.topology is not None:  # refused if it does not suit the ranks
            machine_of(training, training.ranks, ranks_per_node, torch.device(device))
        with _prepared(registry, training.ranks, resume):
            yield Session(registry, job, 0, training.ranks, ranks_per_node, limits)
        return
    ranks_per_node = torchrun_ranks_per_node()
    with (
        join_torchrun(backend_for(device), limits.collectives) as (rank, world_size),
        watched_by_each_other(rank, world_size, limits),
        ExitStack() as stack,
    ):
        options = {"--resume": resume, "--breakdown": breakdown, "--sharding": list(shardings)}
        check_started_alike(device, {**options, **(alike or {})})
        if training.ranks_per_node not in (None, ranks_per_node):
            raise SetupError(
                f"{path}: training.ranks_per_node is {training.ranks_per_node}, but torchrun "
                f"starts {ranks_per_node} ranks a node; leave it out (null) under torchrun"
            )
        if training.topology is not None:
            machine_of(training, world_size, ranks_per_node, torch.device(device))
        if rank == 0:
            with doing("preparing the data"):
                stack.enter_context(_prepared(registry, world_size, resume))
        dist.barrier()
        topology = topology_at_start(
            training, device, ranks_per_node, resume=resume, plugins_dir=plugins_dir
        )
        job = replace(job, topology=topology)
        yield Session(registry, job, rank, world_size, ranks_per_node, limits)


def this_command(registry: Path, *, resume: bool) -> str:
    """Return the command that trains as this process does, for messages."""
    program, *words = sys.argv
    if Path(program).name != "recd":
        words = ["run", str(registry)]
    words = [word for word in words if word != "--resume"]
    launcher = "" if torchrun_rank() is None else "the same launcher with "
    return launcher + shlex.join(["recd", *words, *(["--resume"] if resume else [])])


def hang_limits(registry: RunConfig) -> HangLimits:
    """Return how long a run waits for ranks that hang, and how to go on after that."""
    training = registry.training

    def advice() -> str:
        checkpoints = checkpoints_of(training)
        newest = None if checkpoints is None else checkpoints.newest()
        if newest is not None:
            command = this_command(registry.path, resume=True)
            return (
                f"The last checkpoint is {newest}; the same command with --resume goes on from it: "
                f"{command}"
            )
        if checkpoints is not None:
            command = this_command(registry.path, resume=False)
            return f"No checkpoint was written yet: start anew by {command}"
        return "No checkpoint was written, as training.checkpoint.path is not set: start anew"

    return HangLimits(training.hang_notice, training.hang_timeout, advice)


@contextmanager
def _prepared(registry: RunConfig, world_size: int, resume: bool) -> Iterator[None]:
    """Prepare the data and reserve the folder of checkpoints."""
    checkpoints = checkpoints_of(registry.training)
    if checkpoints is None and resume:
        raise RecdError(f"{registry.path}: --resume needs training.checkpoint.path")
    with nullcontext() if checkpoints is None else checkpoints.reserve(resume):
        with passed_on(()):  # there are no ranks yet: a signal ends it here, and leaves no half
            _prepare(registry, world_size)
        yield


def _prepare(registry: RunConfig, world_size: int) -> None:
    check_dataset(registry)
    dataset = wrapped_dataset(registry)
    dataset.prepare()
    for split in splits_of(registry):
        # Evaluation takes rows that fill no batch too.
        size, ranks = (registry.training.batch_size, world_size) if split == "train" else (1, 1)
        dataset.reader(rank=0, world_size=ranks, batch_size=size, split=split)


def calibration_job(
    registry: RunConfig,
    plugins_dir: Path | None,
    spec: TopologySpec,
    path: Path,
    batch_size: int | None = None,
) -> tuple[RunConfig, Job]:
    """Return ``registry`` with the ranks of ``spec`` and prepared data, and a job that trains it.

    Args:
        registry: to calibrate with.
        plugins_dir: a folder of plugin files.
        spec: of this machine.
        path: the file to write later.
        batch_size: rows of a rank, in place of the file's.

    Raises:
        RecdError: ``path`` exists already, or the data cannot be had.
    """
    refuse_existing(path)
    overrides: dict[str, Any] = {
        "ranks": spec.ranks_per_node,
        "ranks_per_node": None,
        "checkpoint": {},
        "topology": None,  # may be of other ranks than those of this machine
    }
    if batch_size is not None:
        overrides["batch_size"] = batch_size
    registry = registry.with_training(overrides)
    wrapped_dataset(registry).prepare()
    job = Job(
        registry.path,
        plugins_dir=plugins_dir,
        overrides=overrides,
        device=spec.device,
        text=registry.text,
    )
    return registry, job

"""A model as a checkpoint left it, on the ranks that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugins import activity, upstream_noise
from recd_plugins.activity import doing
from recd_plugins.data.fitted_steps import fitted_steps
from recd_plugins.data.loader import pinned
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.data.wrapped_dataset import wrapped_dataset
from recd_plugins.distributed.device import choose_device, device_of_rank
from recd_plugins.distributed.hang_watch import HangLimits
from recd_plugins.distributed.launch import (
    backend_for,
    join_torchrun,
    launch,
    torchrun_rank,
    torchrun_ranks_per_node,
)
from recd_plugins.distributed.watched_ranks import watched_by_each_other
from recd_plugins.interfaces.callback import Quality
from recd_plugins.registry import RunConfig
from recd_plugins.registry.from_file import load_registry
from recd_plugins.training.agreement import check_started_alike, from_rank_0, together
from recd_plugins.training.assembly import Assembled, assemble
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.evaluation import evaluate
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.identity import check_scores
from recd_plugins.training.resume import load_fitted
from recd_plugins.training.steps import steps
from recd_plugins.values.batch import ModelInput

J = TypeVar("J", bound="TrainedJob")
T = TypeVar("T")


@dataclass(frozen=True)
class TrainedJob:
    """Which trained model a rank is to take; travels to it by pickle.

    Attributes:
        registry: the registry file.
        checkpoint: of its run.
        plugins_dir: a folder of plugin files.
        overrides: fields of its ``training:`` section to set.
        settings: values in place of the file's, as ``load_registry`` takes them.
        device: ``cpu`` or ``cuda``.
        text: what the registry file held when the command read it; None where the rank is to.
    """

    registry: Path
    checkpoint: Path
    plugins_dir: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    device: str = "cpu"
    text: str | None = None

    def load(self) -> RunConfig:
        """The registry, with what the job sets."""
        read = load_registry(
            self.registry, plugins_dir=self.plugins_dir, settings=self.settings, text=self.text
        )
        return read.with_training(self.overrides)

    def prepare(self) -> None:
        """Make what data is missing, in one process before ranks read it."""
        wrapped_dataset(self.load()).prepare()

    def planned_by(self, registry: RunConfig) -> RunConfig:
        """The registry by whose data tables are placed: that of ``load``."""
        return registry


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds, ready to score.

    Attributes:
        parts: the sharded model and what it was assembled of.
        registry: that it was trained by, with what was chosen for tables here.
        device: of this rank.
        step: after which it was saved.
        same_data: whether the dataset is what it was trained on.
        checkpoint: of its run.
    """

    parts: Assembled
    registry: RunConfig
    device: torch.device
    step: int
    same_data: bool
    checkpoint: Path

    def logits(self, batches: Iterator[ModelInput]) -> Iterator[Tensor]:
        """Logits of each batch of this rank, float32 ``[B]``, in their order. A collective call.

        Some batches are taken ahead. All ranks give as many.
        """
        parts = self.parts
        registry = parts.prepared.registry
        taken = map(pinned, batches) if self.device.type == "cuda" else batches
        pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, self.device)
        for _, logits, _ in steps(pipeline, taken, registry, parts.dmp.module):
            yield logits

    def evaluate(self, rank: int, world_size: int) -> tuple[Quality | None, Mapping[str, float]]:
        """Quality and metrics on every row of the test split, as a run has them. Collective.

        Raises:
            RecdError: a loss is not finite, or the data is missing or wrong.
        """
        parts, finite = self.parts, FiniteRun(str(self.checkpoint))
        pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, self.device)
        return evaluate(parts.prepared, parts.dmp, pipeline, rank, world_size, self.device, finite)


def load_trained(job: TrainedJob) -> Trained:
    """Assemble the model of a registry and load a checkpoint into it. A collective call.

    Raises:
        RecdError: the checkpoint is damaged, or of another model; says both.
    """
    activity.start()
    upstream_noise.silence()
    registry = job.load()
    if registry.training.workers:
        from recd_plugins.data.workers import start_server

        start_server()
    device = device_of_rank(job.device)
    load_fitted(registry, job.checkpoint)
    planned = job.planned_by(registry)
    # Nothing is trained: FBGEMM may have the optimizer of a table for another device alone.
    planned = replace(planned, further={**planned.further, "optimizer": ()})
    parts = assemble(planned, "plugins", device)
    fit_converter(parts.prepared.registry)
    # As it was trained: what was chosen to place tables by data makes no other model.
    registry = replace(
        parts.prepared.registry, dataset=registry.dataset, wrappers=registry.wrappers
    )
    fitted_steps(registry, registry.dataset.schema())
    same_data, *_ = together(
        lambda: (
            check_scores(job.checkpoint, registry, parts.tables) if dist.get_rank() == 0 else True
        )
    )
    checkpoints = Checkpoints(job.checkpoint.parent, keep=1)
    progress = checkpoints.load_one(job.checkpoint, parts.dmp)
    parts.dmp.eval()
    return Trained(parts, registry, device, progress.step, same_data, job.checkpoint)


def on_ranks(
    registry: RunConfig,
    function: Callable[[int, int, J], T],
    job: J,
    alike: Mapping[str, Any] | None = None,
) -> T:
    """``function(rank, world_size, job)`` on the ranks of a registry, or those of torchrun.

    Ranks of torchrun take rank 0's checkpoint: the newest may be another one a moment later.

    Args:
        registry: says how many ranks.
        function: travels to them by pickle.
        job: likewise.
        alike: what ranks of torchrun have to be asked for alike, by option.

    Returns:
        What it gives on rank 0; under torchrun on this rank.

    Raises:
        RecdError: the data cannot be prepared, on all ranks; or what ``function`` raises.
        SetupError: another rank of torchrun ended, or was asked for something else; names it.
    """
    training = registry.training
    device = choose_device(registry)
    backend = backend_for(device)
    if torchrun_rank() is None:
        job.prepare()
        ranks_per_node = training.ranks_per_node or training.ranks
        return launch(
            function, training.ranks, job, backend=backend, local_world_size=ranks_per_node
        )[0]
    torchrun_ranks_per_node()  # refused before ranks wait for each other
    # Nothing ends by itself: how long a table takes to write is not known.
    limits = HangLimits(training.hang_notice, None, lambda: "Start the command anew")
    with (
        join_torchrun(backend) as (rank, world_size),
        watched_by_each_other(rank, world_size, limits),
    ):
        check_started_alike(device, alike or {})
        job = replace(job, checkpoint=from_rank_0(job.checkpoint))

        def prepare() -> None:
            if rank == 0:
                with doing("preparing the data"):
                    job.prepare()

        together(prepare)
        return function(rank, world_size, job)

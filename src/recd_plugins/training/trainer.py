"""The training loop of one rank."""

from __future__ import annotations

import math
import signal
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist
from torch import Tensor

from recd_plugins.compat.lookup_kernels import close_kernels
from recd_plugins.config import RunConfig, TrainingSpec
from recd_plugins.config.device import device_of_rank
from recd_plugins.config.from_file import load_registry
from recd_plugins.data.loader import DataLoader
from recd_plugins.data.preprocess import FittedState, fitted_state
from recd_plugins.interfaces import Section, Split, TrainedRun
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.step_cost import StageTimes
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.report.output import persistent_output
from recd_plugins.runtime import activity
from recd_plugins.runtime.errors import RecdError, RunInterrupted
from recd_plugins.runtime.generators import generators_kept, seed_generators
from recd_plugins.runtime.imports import silence_upstream
from recd_plugins.runtime.machine import keep_freed_memory
from recd_plugins.runtime.rank_agreement import check_agreement, from_rank_0, together
from recd_plugins.runtime.signals import Interrupts
from recd_plugins.sharding.table_report import describe_tables
from recd_plugins.training.callbacks import Callbacks, callbacks_of
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, ValidationCurve
from recd_plugins.training.dry_run import unused_line, user_line
from recd_plugins.training.evaluation import (
    Measured,
    ProgressiveValidation,
    Validation,
    evaluate,
    step_code,
    validated_split,
)
from recd_plugins.training.finite import MOST_UNSEEN, FiniteRun
from recd_plugins.training.identity import check_fitted_alike, identity_of, resume_fitted
from recd_plugins.training.measurement import Measurement, sections_of, sum_by_kind
from recd_plugins.training.optimizer import LearningRates
from recd_plugins.training.progress_bar import ProgressLine, progress_bar
from recd_plugins.training.rank_state import buffers_of_rank_0, put_back_generators
from recd_plugins.training.result import Result, StallReport
from recd_plugins.training.sharded_model import Variant, build_sharded_model, resume_choice
from recd_plugins.training.uneven_batches import weight_losses


@dataclass(frozen=True)
class Job:
    """Describes a training run. It is pickled and sent to each rank.

    Attributes:
        overrides: dict of values that replace fields of the section ``training:``.
        breakdown: whether to profile some steps.
        sharding: name of a plugin that replaces the plugin of the first sharding entry.
        allowed: settings that may differ from those of the run that wrote the checkpoint.
        settings: values that override the file, ``KEY=VALUE``.
        log_every: seconds between progress lines; None for a live line on a terminal.
        label: name of the run in progress lines.
        topology: the measured topology; None for the topology of the run config.
        text: text of the registry file at the start of the run; None reads the file on each rank.
        verbose: whether to print all choices of ``auto``, and how each table is sharded.
    """

    registry: Path
    variant: Variant = "plugins"
    plugins_dir: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    breakdown: bool = False
    sharding: str | None = None
    allowed: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    log_every: float | None = None
    label: str = "training"
    topology: TopologySpec | None = None
    text: str | None = None
    verbose: bool = False

    def load(self) -> RunConfig:
        """Return the run config with the job's settings."""
        read = load_registry(
            self.registry,
            plugins_dir=self.plugins_dir,
            sharding=self.sharding,
            settings=self.settings,
            text=self.text,
        )
        return read.with_training(self.overrides)

    @property
    def name(self) -> str:
        """Return the run's name for errors: the registry file, and in a comparison the variant."""
        plain = self.variant == "plugins" and self.sharding is None
        return str(self.registry) if plain else f"{self.registry}, {self.sharding or self.variant}"


def train(rank: int, world_size: int, job: Job) -> Result:
    """Train the model of a job in an existing process group. All ranks must call this."""
    with persistent_output(), Interrupts(rank, world_size) as interrupts:
        activity.start()
        silence_upstream()
        keep_freed_memory()
        trainer = Trainer(rank, world_size, job, interrupts)
        trainer.train()
        with activity.doing("finishing the run"):
            return trainer.result()


def checkpoints_of(
    training: TrainingSpec,
    identity: Mapping[str, Any] | None = None,
    allowed: Collection[str] = (),
    fitted: FittedState | None = None,
) -> Checkpoints | None:
    """Return the checkpoint folder of a run, or None if ``training.checkpoint.path`` is unset."""
    spec = training.checkpoint
    if spec.path is None:
        return None
    return Checkpoints(
        Path(spec.path), spec.keep, identity, allowed, fitted, full_every=spec.full_every
    )


class BatchSource:
    """Batches of one run, epoch after epoch, up to a number of steps.

    A pipeline reads ahead, but a checkpoint stores the reader position after the last trained
    batch. This class therefore queues reader positions until ``trained`` is called. ``loader`` is
    positioned at ``start``. ``epochs`` and ``steps`` include those before ``start``.
    """

    def __init__(
        self,
        loader: DataLoader,
        start: Progress | None = None,
        epochs: int = 1,
        steps: int | None = None,
    ) -> None:
        self._loader = loader
        self._start = start or Progress()
        self._step, self._epoch = self._start.step, self._start.epoch
        self._epochs = epochs
        self._steps = steps
        self._waiting: deque[Progress] = deque()

    @property
    def expected_steps(self) -> int:
        """Return the step at which the run ends; an estimate if the number of ranks has changed."""
        left = self._loader.num_left()
        if left is None:
            whole = self._epochs * len(self._loader)
        else:
            left += (self._epochs - self._start.epoch - 1) * len(self._loader)
            whole = self._start.step + max(0, left)
        return whole if self._steps is None else min(whole, self._steps)

    def __iter__(self) -> Iterator[ModelInput]:
        last = math.inf if self._steps is None else self._steps
        for epoch in range(self._epoch, self._epochs):
            self._epoch = epoch
            batches = iter(self._loader)
            # A stream may have no batch after the last step.
            while self._step < last and (batch := next(batches, None)) is not None:
                self._step += 1
                progress = Progress(self._step, self._epoch, self._loader.state_dict())
                self._waiting.append(progress)
                yield batch

    def trained(self) -> Progress:
        """Record that the oldest queued batch was trained on, and return the run's progress."""
        return self._waiting.popleft()


class Trainer:
    """Trains the model of a ``Job`` on one rank. All ranks must call each method together."""

    def __init__(self, rank: int, world_size: int, job: Job, interrupts: Interrupts) -> None:
        self.rank, self.world_size, self.job, self.interrupts = rank, world_size, job, interrupts
        # The baseline of a comparison has no callbacks or checkpoints, and prints nothing.
        self.is_own = job.variant == "plugins"
        registry = job.load()
        resume_fitted(registry)
        if self.is_own:
            registry = resume_choice(registry, quiet=rank > 0, verbose=job.verbose)
        self.training = training = registry.training
        if training.workers:
            from recd_plugins.data.workers import start_server

            start_server()

        # Model, pipeline and data.
        self.device = device = device_of_rank(job.device)
        self.parts = parts = build_sharded_model(
            registry, job.variant, device, topology=job.topology
        )
        self.dmp, self.registry = parts.dmp, parts.prepared.registry
        if any(entry.plugin.uneven_batches for entry in self.registry.wrappers):
            weight_losses(self.dmp)
        self.pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
        self.loader = parts.prepared.dataloader(rank=rank, world_size=world_size, device=device)
        self.loader.interrupted = lambda: interrupts.received
        check_fitted_alike(self.registry)
        self.rates = LearningRates(parts.optimizer, training.schedule)
        self.step_samples = training.batch_size * world_size
        self.callbacks = self._make_callbacks()

        # Resume.
        start = Progress()
        self.checkpoints = self._make_checkpoints()
        if self.checkpoints is not None:
            start = self.checkpoints.load(parts.dmp, parts.optimizer)
        self.progress, self.first_step, self.first_curve = start, start.step, start.validation
        self.finite = FiniteRun(job.name, self.checkpoints)
        activity.start(self.first_step)
        if self.is_own:
            self._say(unused_line(self.registry))
            self._say(user_line(self.registry))
            if job.verbose or (parts.prepared.chosen and parts.prepared.chosen.offered):
                self._say(parts.prepared.chosen)
            if job.verbose and rank == 0:
                self._say(describe_tables(self.dmp))
        if start.reader is not None:
            check_agreement("resuming", {"the reader's position": start.reader})
            self.loader.load_state_dict(start.reader)
        if self.first_step:
            self._say(f"resumed at step {self.first_step} of {training.checkpoint.path}")

        # Figures of the run.
        self.validation = self._make_validation()
        stopped = self.validation is not None and self.validation.stops
        ends_at = self.first_step if stopped else training.steps
        self.source = BatchSource(self.loader, start, training.epochs, ends_at)
        if self.is_own and self.source.expected_steps >= len(self.loader) and not start.step:
            self._say(self._unread_line())
        self.measurement = Measurement(
            parts.dmp,
            parts.prepared.plugin_strategies,
            device,
            self.first_step,
            breakdown=job.breakdown,
            tasks=self.registry.dataset.schema().tasks,
        )
        self.pending: list[Tensor] = []
        self.losses = list(start.losses) or [math.nan] * start.step
        self.saved = start.step, self._curve()
        self.progressive: ProgressiveValidation | None = None
        if self.is_own and training.progressive_validation is not None:
            tasks = self.registry.dataset.schema().tasks
            self.progressive = ProgressiveValidation(training.progressive_validation, tasks)
        self.newest: Measured | None = None
        self.best: Measured | None = None

    def train(self) -> None:
        """Train until the last step, or raise ``RunInterrupted`` after a signal."""
        validation, measurement, parts = self.validation, self.measurement, self.parts
        batches = self._batches()
        expected_steps = self.source.expected_steps
        self.callbacks.start(
            self.progress, expected_steps, parts.tables, parts.dmp, parts.optimizer
        )
        self.dmp.train()
        self._restore_generators_at_first_forward()
        measurement.begin()
        line = progress_bar(
            self.rank,
            self.job.label,
            self.first_step,
            expected_steps,
            samples=self.step_samples,
            waiting=measurement.stalls.recent,
            lag=lambda: self.loader.lag,
            log_every=self.job.log_every,
        )
        with self.loader, line as shown:
            while True:
                # The pipeline is drained before each validation and at the end of the data.
                segment = batches
                if validation is not None:
                    every = validation.every
                    segment = islice(batches, every - self.progress.step % every)
                self._train_on(segment, shown)
                if self.loader.is_stream:  # a signal also ends the wait for a batch
                    self._stop_if_asked(at_once=True)
                if self.loader.is_idle:
                    measurement.ran_dry()
                    batches = self._batches()
                if validation is None or not validation.due(self.progress.step):
                    if self.loader.is_idle:
                        continue
                    break
                measurement.ran_dry()
                with shown.paused():
                    is_best = self._validate(validation)
                self.dmp.train()
                measurement.begin()
                self._after_step(is_best=is_best)
                if validation.stops:
                    break
        step = self.progress.step
        if validation is not None and validation.stops and step > self.first_step:
            self._say(validation.stopped)
        measurement.end(step)
        if validation is not None and step and not validation.is_measured(step):
            self._validate(validation)
        self._average_losses()
        self._save()

    def _batches(self) -> Iterator[ModelInput]:
        return map(self.callbacks.queued, self.measurement.stalls.metered(self.source))

    def _train_on(self, batches: Iterator[ModelInput], line: ProgressLine) -> None:
        while True:
            done = self.progress.step
            self.rates.set(done)
            try:
                with (
                    self.measurement.step(done),
                    step_code(self.registry, self.pipeline, self.dmp.module),
                ):
                    loss, logits, labels = self.pipeline.progress(batches)
            except StopIteration:
                return
            self.progress = self.source.trained()
            step = self.progress.step
            activity.reached(step)
            self.measurement.predictions.update(logits, labels)
            if self.progressive is not None:
                self._end_window(self.progressive, logits, labels)
            line(loss)
            rate = self.training.learning_rate * self.rates.factor(done)
            self.callbacks.trained(step, loss, rate)
            self.pending.append(loss)
            if len(self.pending) == MOST_UNSEEN:
                self._average_losses()
            if self.validation is None or not self.validation.due(step):
                self._after_step()

    def _end_window(
        self, progressive: ProgressiveValidation, logits: Tensor, labels: Tensor
    ) -> None:
        step = self.progress.step
        if (measured := progressive.update(step, logits, labels)) is not None:
            self._say(progressive.line(step, measured))
            self.callbacks.evaluated(step, "train", measured)

    def _after_step(self, *, is_best: bool = False) -> None:
        """Save a checkpoint if one is due, and stop the run after a signal."""
        if is_best or self.progress.step % self.training.checkpoint.every == 0:
            self._save()
        self._stop_if_asked()

    def _stop_if_asked(self, *, at_once: bool = False) -> None:
        if not (number := self.interrupts.asked(at_once=at_once)):
            return
        self._save()
        self.callbacks.interrupted(self.progress.step, signal.Signals(number).name)
        close_kernels(self.dmp)
        newest = None if self.checkpoints is None else self.checkpoints.newest()
        saved = "no checkpoint was saved, because training.checkpoint.path is not set"
        if self.checkpoints is not None:
            saved = "no checkpoint was saved, because no step was trained"
        if newest is not None:
            saved = f"its checkpoint is {newest}"
        dist.barrier()  # a rank that exits early would stop the other ranks
        raise RunInterrupted.by(
            number,
            f"the run was ended after step {self.progress.step}; {saved}",
            resumable=newest is not None,
        )

    def _save(self) -> None:
        """Write a checkpoint, unless this step and its validation results are already saved."""
        step, curve = self.progress.step, self._curve()
        if self.checkpoints is None or self.saved == (step, curve):
            return
        self._average_losses()
        losses = [] if self.losses and math.isnan(self.losses[0]) else self.losses
        with activity.doing("saving a checkpoint", long=True):
            self.finite.check_state(self.dmp, self.parts.optimizer, step)
            progress = replace(
                self.progress,
                reader=self.loader.merged(self.progress.reader),
                losses=list(losses),
                callbacks=self.callbacks.states(),
                validation=curve,
            )
            self.checkpoints.save(self.dmp, self.parts.optimizer, progress)
        self.saved = step, curve

    def _average_losses(self) -> None:
        self.losses += self.finite.losses(self.pending, len(self.losses))

    def _validate(self, validation: Validation) -> bool:
        """Evaluate the model at the current step; return True if it is the best so far."""
        newest = self._evaluate(validation.split)
        is_best = validation.add(self.progress.step, newest)
        if validation.split == "test":
            self.newest, self.best = newest, newest if is_best else self.best
        self._say(validation.line(newest))
        self.callbacks.evaluated(self.progress.step, validation.split, newest)
        return is_best

    def _evaluate(self, split: Split = "test") -> Measured:
        with generators_kept(), buffers_of_rank_0(self.dmp):
            of_ranks = self.rank, self.world_size, self.device
            args = (self.parts.prepared, self.dmp, self.pipeline, *of_ranks, self.finite)
            return evaluate(*args, split)

    def _test_figures(self) -> Measured:
        """Return the test results of the best validated step, or of the last step."""
        best_step = None if self.validation is None else self.validation.curve.best_step
        if self.best is None and best_step is not None and best_step < self.progress.step:
            self.best = self._evaluate_checkpoint(best_step)
            if self.best is not None and self.validation and self.validation.split != "test":
                self.callbacks.evaluated(self.progress.step, "test", self.best)
        if self.best is not None:
            return self.best
        if self.newest is None:
            self.newest = self._evaluate()
            self.callbacks.evaluated(self.progress.step, "test", self.newest)
        return self.newest

    def _evaluate_checkpoint(self, step: int) -> Measured | None:
        """Evaluate the checkpoint of ``step``, then reload the weights of the last step.

        Return None if the checkpoint is missing or damaged.
        """
        if self.checkpoints is None:
            self._say(
                "the test metrics are those of the last step, because the run saves no "
                "checkpoints. Set training.checkpoint.runs"
            )
            return None
        best, last = self.checkpoints.of_step(step), self.checkpoints.of_step(self.progress.step)
        folder = Checkpoints(best.parent, keep=1)  # the identity was compared before
        try:
            if not from_rank_0(best.is_dir()):
                raise RecdError(f"{best}: the best checkpoint was deleted")
            folder.load_one(best, self.dmp)
        except RecdError as error:
            self._say(
                f"the test metrics are those of the last step, because the best step cannot be "
                f"evaluated ({error})"
            )
            measured = None
        else:
            measured = self._evaluate()
        folder.load_one(last, self.dmp)
        return measured

    def result(self) -> Result:
        """Return the results of the finished run."""
        test, metrics = self._test_figures()
        parts, measurement = self.parts, self.measurement
        ranks = together(measurement.figures)
        counts = [rank.counts for rank in ranks if rank.counts is not None]
        profiles = [rank.stages for rank in ranks if rank.stages is not None]
        seconds = measurement.meter.step_seconds()
        chosen = parts.prepared.chosen
        sections: dict[str, Section] = {} if chosen is None else {chosen.name: chosen}
        if parts.context is not None:  # a baseline has no table plugins
            sent = sum_by_kind([count.sent_by_channel for count in counts]) if counts else None
            run = TrainedRun(
                self.dmp.module, self.dmp.plan, parts.tables, parts.context, sent, observed=()
            )
            sections |= sections_of(parts.prepared.plugin_strategies, run, ranks)
        result = Result(
            samples_per_second=self.step_samples * len(seconds) / sum(seconds) if seconds else None,
            step_seconds=statistics.median(seconds) if seconds else None,
            collective_bytes=sum_by_kind([count.sent for count in counts]),
            ids_looked_up=sum(count.ids for count in counts) if counts else None,
            peak_memory_bytes=max(rank.peak for rank in ranks),
            losses=self.losses,
            train=measurement.predictions.summarize(),
            test=test,
            metrics=metrics,
            stages=StageTimes.mean(profiles) if profiles else None,
            sections=sections,
            stalls=StallReport.of([rank.stalls for rank in ranks]),
            ingestion=together(lambda: dict(self.loader.report()))
            if self.registry.ingestion is not None
            else None,
            validation=self.validation,
            progressive=None if self.progressive is None else self.progressive.windows,
            first_step=self.first_step,
        )
        self.callbacks.ended(self.progress.step, self.losses)
        close_kernels(self.dmp)
        return result

    def _make_callbacks(self) -> Callbacks:
        job = self.job
        settings = [*job.settings]
        settings += [f"training.{name}={value}" for name, value in job.overrides.items()]
        if job.sharding is not None:
            settings.append(f"--sharding {job.sharding}")
        return Callbacks(
            self.registry.path,
            callbacks_of(self.registry, self.parts.tables) if self.is_own else [],
            self.rank,
            self.world_size,
            step_samples=self.step_samples,
            settings=settings,
            text=self.registry.text or "",
            config=self.registry,
        )

    def _make_checkpoints(self) -> Checkpoints | None:
        if not self.is_own or self.training.checkpoint.path is None:
            return None
        identity = fitted = None
        if self.rank == 0:
            identity = identity_of(self.registry, self.parts.tables)
            identity["training"]["ranks"] = self.world_size  # under torchrun not the registry's
            fitted = fitted_state(self.registry)
        return checkpoints_of(self.training, identity, self.job.allowed, fitted)

    def _make_validation(self) -> Validation | None:
        spec = self.training.validation
        if not self.is_own or spec is None:
            return None
        validation = Validation(
            spec,
            self.progress.validation,
            self.progress.step,
            split=validated_split(self.registry),
            epoch_steps=max(1, len(self.loader)),
            tasks=self.registry.dataset.schema().tasks,
        )
        if validation.stops:
            self._say(validation.advice)
        return validation

    def _curve(self) -> ValidationCurve | None:
        """Return this run's validation results; without validation, those of its checkpoint."""
        return self.first_curve if self.validation is None else self.validation.curve

    def _restore_generators_at_first_forward(self) -> None:
        """Seed or restore random generators directly before the first forward pass.

        Setup and pipelines that trace the model on the first batch also draw random numbers.
        """
        state = {} if self.checkpoints is None else self.checkpoints.rank_state(self.first_step)

        def place(*_: object) -> None:
            handle.remove()
            seed_generators((self.training.seed + self.first_step) % (1 << 63))
            put_back_generators(state)

        handle = self.dmp.module.register_forward_pre_hook(place)

    def _unread_line(self) -> str:
        """Return a line about the rows that fill no batch; "" if there are none."""
        # Wrappers may change the number of rows.
        if self.registry.wrappers or self.loader.is_stream:
            return ""
        whole = self.registry.dataset.reader(rank=0, world_size=1, batch_size=1, split="train")
        unread = len(whole) - len(self.loader) * self.step_samples
        if not unread:
            return ""
        return f"{unread:,} of {len(whole):,} training rows do not fill a batch and are not used"

    def _say(self, line: object) -> None:
        if self.rank == 0 and line:
            click.echo(str(line), err=True)

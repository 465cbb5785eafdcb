"""One rank's training run, from the registry to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch.distributed as dist

from recd_plugins import activity, upstream_noise
from recd_plugins.data.fitted_steps import FittedState, fitted_state
from recd_plugins.distributed.device import device_of_rank
from recd_plugins.distributed.lookup_kernels import close_kernels
from recd_plugins.distributed.table_report import describe_tables
from recd_plugins.errors import PluginError, RecdError
from recd_plugins.generators import generators_kept, seed_generators
from recd_plugins.lasting_output import lasting_output
from recd_plugins.registry import TrainingSpec
from recd_plugins.training.agreement import from_rank_0
from recd_plugins.training.assembly import assemble, makers
from recd_plugins.training.batch_source import BatchSource
from recd_plugins.training.callbacks import Callbacks, callbacks_of
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.dense_gradients import EveryGradient
from recd_plugins.training.dry_run import converter_line, rest_line, rounded_line, unused_line
from recd_plugins.training.evaluation import evaluate
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.group_report import GroupReport
from recd_plugins.training.identity import identity_of
from recd_plugins.training.interrupts import Interrupts
from recd_plugins.training.job import Job
from recd_plugins.training.learning_rates import LearningRates
from recd_plugins.training.measurement import Measurement
from recd_plugins.training.meter import sum_by_kind
from recd_plugins.training.progress_bar import ProgressLine, progress_bar
from recd_plugins.training.rank_state import buffers_of_rank_0, put_back_generators
from recd_plugins.training.record import Record
from recd_plugins.training.result import Result
from recd_plugins.training.resume import check_fitted_alike, resume_choice, resume_fitted
from recd_plugins.training.stall_report import StallReport
from recd_plugins.training.steps import steps
from recd_plugins.training.table_parts import sections_of
from recd_plugins.training.validation import Measured, Validation, stretches
from recd_plugins.values.batch import ModelInput
from recd_plugins.values.stages import StageTimes

T = TypeVar("T")


def train(rank: int, world_size: int, job: Job) -> Result:
    """Train as the registry says. A collective call in a process group that exists.

    Raises:
        RecdError: the registry, the data or the checkpoint does not allow it.
        RunInterrupted: Ctrl-C, SIGTERM or SIGHUP ended it before its time.
    """
    with lasting_output(), Interrupts(rank, world_size) as interrupts:
        activity.start()
        upstream_noise.silence()
        run = _Run(rank, world_size, job, interrupts)
        run.train()
        with activity.doing("finishing the run"):
            return run.result()


def checkpoints_of(
    training: TrainingSpec,
    identity: Mapping[str, Any] | None = None,
    allowed: Collection[str] = (),
    fitted: FittedState | None = None,
) -> Checkpoints | None:
    """Where a run keeps its checkpoints, None where it keeps none."""
    spec = training.checkpoint
    if spec.path is None:
        return None
    return Checkpoints(Path(spec.path), spec.keep, identity, allowed, fitted)


class _Run:
    """A run on one rank, ready to train; all its calls are collective."""

    def __init__(self, rank: int, world_size: int, job: Job, interrupts: Interrupts) -> None:
        self._rank, self._world_size, self._job = rank, world_size, job
        registry = job.load()
        resume_fitted(registry)
        # The baseline of a comparison is no run of its own: nobody looks on, it leaves no
        # checkpoints, and says nothing.
        self._own = job.side == "plugins"
        if self._own:
            registry = resume_choice(registry, quiet=rank > 0)
        self._training = training = registry.training
        if training.workers:
            from recd_plugins.data.workers import start_server

            start_server()
        self._device = device = device_of_rank(job.device)
        self._parts = parts = assemble(registry, job.side, device, topology=job.topology)
        self._registry = parts.prepared.registry
        self._pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
        self._gradients = EveryGradient(parts.dmp, makers(self._registry))
        self._loader = parts.prepared.dataloader(rank=rank, world_size=world_size, device=device)
        check_fitted_alike(self._registry)
        self._block = self._loader.batches_a_block()
        self._rates = LearningRates(parts.optimizer, training.schedule)
        self._callbacks = self._watching()
        self._checkpoints = checkpoints = self._kept()
        self._progress = Progress()
        self._rank_state: Mapping[str, np.ndarray] = {}
        if checkpoints is not None:
            self._progress = checkpoints.load(parts.dmp, parts.optimizer)
            self._rank_state = checkpoints.rank_state(self._progress.step)
        self._first_step = self._progress.step
        activity.start(self._first_step)
        self._say_what_is_trained()
        self._place_loader()
        self._finite = FiniteRun(job.name, checkpoints)
        if self._first_step:
            self._finite.check_loaded(parts.dmp, parts.optimizer)
        self._validation = self._validated()
        stopped = self._validation is not None and self._validation.stops
        self._ends_at = self._first_step if stopped else training.steps
        self._newest: Measured | None = None
        self._best: Measured | None = None
        self._record = Record(
            parts,
            self._finite,
            self._callbacks,
            interrupts,
            self._progress,
            self._validation,
            checkpoints,
            training.checkpoint.every,
        )
        self._source = BatchSource(self._loader, self._progress, training.epochs, self._ends_at)
        self._measurement = Measurement(parts, device, self._first_step, breakdown=job.breakdown)

    def _watching(self) -> Callbacks:
        job = self._job
        settings = [*job.settings]
        settings += [f"training.{name}={value}" for name, value in job.overrides.items()]
        if job.sharding is not None:
            settings.append(f"--sharding {job.sharding}")
        return Callbacks(
            self._registry.path,
            callbacks_of(self._registry, self._parts.tables) if self._own else [],
            self._rank,
            self._world_size,
            step_samples=self._step_samples,
            settings=settings,
            text=self._registry.text or "",
        )

    def _kept(self) -> Checkpoints | None:
        if not self._own or self._training.checkpoint.path is None:
            return None
        identity = fitted = None
        if self._rank == 0:
            identity = identity_of(self._registry, self._parts.tables)
            identity["training"]["ranks"] = self._world_size  # torchrun's, if it started them
            fitted = fitted_state(self._registry)
        return checkpoints_of(self._training, identity, self._job.allowed, fitted)

    def _validated(self) -> Validation | None:
        spec = self._training.validation
        if not self._own or spec is None:
            return None
        validation = Validation(spec, self._progress.validation, self._progress.step)
        if validation.left:
            self._say(validation.left)
        if validation.stops:
            self._say(f"{validation.report()}; there is nothing to train")
        return validation

    def _place_loader(self) -> None:
        """Have the loader go on where the checkpoint's did."""
        if self._progress.reader is None:
            return
        try:
            self._loader.load_state_dict(self._progress.reader)
        except PluginError as error:
            raise RecdError(
                f"{self._training.checkpoint.path}: reader of progress.json, step "
                f"{self._first_step}: is no position of this data ({error})"
            ) from error

    def _say_what_is_trained(self) -> None:
        if self._own and self._rank == 0:
            rest = rest_line(self._registry, len(self._loader), self._step_samples)
            chosen = self._parts.prepared.chosen
            converter, setting = "", self._parts.setting
            if setting is not None:
                profile = setting.data.profile()
                converter = converter_line(self._registry, profile, self._world_size)
            unused, rounded = unused_line(self._registry), rounded_line(self._registry)
            lines = unused, rounded, converter, rest, chosen
            for line in filter(None, lines):
                self._say(str(line))
            self._say(str(describe_tables(self._parts.dmp)))
        if self._first_step:
            self._say(f"resumed at step {self._first_step} of {self._training.checkpoint.path}")

    def _say(self, line: str) -> None:
        if self._rank == 0:
            click.echo(line, err=True)

    @property
    def _step_samples(self) -> int:
        return self._training.batch_size * self._world_size

    def train(self) -> None:
        """Train to the end, or raise ``RunInterrupted``."""
        measurement = self._measurement
        batches = self._callbacks.watched(measurement.stalls.metered(self._source))
        validation = self._validation
        spec = None if validation is None else self._training.validation
        expected_steps = self._source.expected_steps
        self._callbacks.start(self._progress, expected_steps, self._parts.tables)
        self._parts.dmp.train()
        self._draw_from_first_forward()
        measurement.begin()
        with self._loader, self._progress_line(expected_steps) as line:
            for stretch in stretches(batches, self._first_step, spec):
                self._train(stretch, line)
                if validation is not None and validation.due(self._progress.step):
                    self._validate(validation, line)
                    if validation.stops:
                        break
        if self._first_step == self._progress.step > 0 and self._ends_at == self._training.steps:
            self._say(f"{self._source.limit}: there is nothing to train")
        measurement.end(self._progress.step)
        if (
            validation is not None
            and self._progress.step
            and not validation.is_measured(self._progress.step)
        ):
            self._add_to(validation)
        self._record.look()
        self._record.save(self._progress)

    def _draw_from_first_forward(self) -> None:
        """Have generators be where they are to be then, whatever was drawn in the making.

        A pipeline draws, too, when it traces the model at its first batch.
        """

        def place(*_: object) -> None:
            handle.remove()
            seed_generators((self._training.seed + self._first_step) % (1 << 63))
            put_back_generators(self._rank_state)

        handle = self._parts.dmp.module.register_forward_pre_hook(place)

    def _train(self, batches: Iterator[ModelInput], line: ProgressLine) -> None:
        """Train on batches until they are no more."""
        rates, callbacks, validation = self._rates, self._callbacks, self._validation
        outputs = steps(self._pipeline, batches, self._registry, self._parts.dmp.module)
        while True:
            rates.set(self._progress.step)
            try:
                with self._measurement.step(self._progress.step):
                    loss, logits, labels = next(outputs)
            except StopIteration:
                return
            self._gradients.check(self._progress.step + 1)
            rate = self._training.learning_rate * rates.factor(self._progress.step)
            self._progress = progress = self._source.trained()
            activity.reached(progress.step)
            self._measurement.trained(logits, labels)
            line(loss)
            callbacks.trained(progress.step, loss, rate)
            self._record.add(loss)
            if validation is None or not validation.due(progress.step):
                self._record.settle(progress)

    def _progress_line(self, expected_steps: int) -> AbstractContextManager[ProgressLine]:
        return progress_bar(
            self._rank,
            self._job.sharding or self._job.side,
            self._first_step,
            expected_steps,
            samples=self._step_samples,
            waiting=self._measurement.waiting,
            log_every=self._job.log_every,
        )

    def _validate(self, validation: Validation, line: ProgressLine) -> None:
        """Measure the model, of which no batch is in flight: the pipeline is dry."""
        self._measurement.ran_dry()
        with line.paused():
            best = self._add_to(validation)
        self._parts.dmp.train()
        self._measurement.begin()
        self._record.settle(self._progress, best=best)

    def _add_to(self, validation: Validation) -> bool:
        """Measure the model after the present step and return whether it is the best so far."""
        self._newest = newest = self._evaluated()
        best = validation.add(self._progress.step, newest)
        if best:
            self._best = newest
        self._say(validation.line(newest))
        self._callbacks.evaluated(self._progress.step, "test", newest)
        return best

    def _evaluated(self) -> Measured:
        with generators_kept(), buffers_of_rank_0(self._parts.dmp):
            return evaluate(
                self._parts.prepared,
                self._parts.dmp,
                self._pipeline,
                self._rank,
                self._world_size,
                self._device,
                self._finite,
            )

    def _test_figures(self, best_step: int | None) -> Measured:
        """Return test figures of the best validated step, or of the last step if there is none."""
        if self._best is None and best_step is not None and best_step < self._progress.step:
            self._best = self._measure_checkpoint(best_step)
        if self._best is not None:
            return self._best
        if self._newest is None:
            self._newest = self._evaluated()
            self._callbacks.evaluated(self._progress.step, "test", self._newest)
        return self._newest

    def _measure_checkpoint(self, step: int) -> Measured | None:
        """Evaluate the checkpoint of a step of an earlier process; None if it is gone or damaged.

        The weights of the last step are loaded again afterwards.
        """
        if self._checkpoints is None:
            return None
        best, last = self._checkpoints.of_step(step), self._checkpoints.of_step(self._progress.step)
        if not from_rank_0(best.is_dir()):
            self._say(f"{best}: the best checkpoint is gone; test figures are of the last step")
            return None
        # Without the identity, which was compared when the run was resumed.
        folder = Checkpoints(best.parent, keep=1)
        problem = ""
        try:
            folder.load_one(best, self._parts.dmp)
        except RecdError as error:
            problem = str(error)
        problem = next(filter(None, _from_every_rank(problem)), "")
        measured = None if problem else self._evaluated()
        folder.load_one(last, self._parts.dmp)
        if problem:
            self._say(f"{problem}; test figures are of the last step")
        return measured

    def result(self) -> Result:
        """Figures of the run, which has ended."""
        report = None if self._validation is None else self._validation.report()
        test, metrics = self._test_figures(None if report is None else report.curve.best_step)
        prepared, training = self._parts.prepared, self._training
        ranks, groups = zip(
            *_from_every_rank((self._measurement.figures(), self._source.groups)), strict=True
        )
        counts = [rank.counts for rank in ranks if rank.counts is not None]
        profiles = [rank.stages for rank in ranks if rank.stages is not None]
        stages = StageTimes.mean(profiles) if profiles else None
        seconds = self._measurement.step_seconds()
        samples = self._step_samples * len(seconds)
        chosen = {} if prepared.chosen is None else {prepared.chosen.name: prepared.chosen}
        sections = sections_of(
            self._parts,
            sum_by_kind([count.sent_by_channel for count in counts]) if counts else None,
            [rank.observed for rank in ranks],
            taken={*(field.name for field in fields(Result)), *chosen},
        )
        ingestion = self._registry.ingestion
        stalls = StallReport.of(
            [rank.stalls for rank in ranks],
            training.workers,
            self._block,
            None if ingestion is None else ingestion.plugin.name,
        )
        result = Result(
            samples_per_second=samples / sum(seconds) if seconds else None,
            step_seconds=statistics.median(seconds) if seconds else None,
            collective_bytes=sum_by_kind([count.sent for count in counts]),
            ids_looked_up=sum(count.ids for count in counts) if counts else None,
            peak_memory_bytes=max(rank.peak for rank in ranks),
            losses=self._record.losses,
            train=self._measurement.predictions.summarize(),
            test=test,
            metrics=metrics,
            stages=stages,
            step_memory=max(
                filter(None, (rank.memory for rank in ranks)),
                key=lambda memory: memory.peak,
                default=None,
            ),
            sections=chosen | sections,
            groups=GroupReport.of(groups, prepared.expected_groups()),
            stalls=stalls,
            ingestion=None if ingestion is None else _from_every_rank(dict(self._loader.report())),
            validation=report,
            first_step=self._first_step,
            prediction=_from_every_rank(self._measurement.prediction(stages))[0],
        )
        self._callbacks.ended(self._progress.step, self._record.losses)
        close_kernels(self._parts.dmp)
        return result


def _from_every_rank(value: T) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone

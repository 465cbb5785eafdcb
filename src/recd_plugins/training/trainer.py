"""One rank's training run, from the registry to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch.distributed as dist

from recd_plugins import activity, upstream_noise
from recd_plugins.data.fitted_state import FittedState, fitted_state
from recd_plugins.data.stalls import StallMeter
from recd_plugins.distributed.device import device_of_rank
from recd_plugins.distributed.lookup_kernels import close_kernels
from recd_plugins.distributed.table_report import describe_tables
from recd_plugins.errors import PluginError, RecdError
from recd_plugins.interfaces import Section
from recd_plugins.interfaces.callback import Quality
from recd_plugins.model.deferred_tables import generators_kept
from recd_plugins.planning.prepared import load_registry
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.registry import TrainingSpec
from recd_plugins.training.assembly import Side, assemble
from recd_plugins.training.batch_source import BatchSource
from recd_plugins.training.breakdown import StepMemory, StepProfile
from recd_plugins.training.callbacks import Callbacks, callbacks_of
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.drift import Drift, Prediction
from recd_plugins.training.dry_run import rest_line, unused_line
from recd_plugins.training.evaluation import evaluate
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.first_choice import resume_choice
from recd_plugins.training.fitted import resume_fitted
from recd_plugins.training.group_report import GroupReport
from recd_plugins.training.identity import identity_of
from recd_plugins.training.interrupts import Interrupts
from recd_plugins.training.learning_rates import LearningRates
from recd_plugins.training.memory import peak_bytes, reset_peak
from recd_plugins.training.meter import Meter, sum_by_kind
from recd_plugins.training.progress_bar import progress_bar
from recd_plugins.training.quality import Predictions
from recd_plugins.training.record import Record
from recd_plugins.training.stall_report import StallReport
from recd_plugins.training.steps import steps
from recd_plugins.training.table_parts import channels_of, observed_by, sections_of
from recd_plugins.training.validation import Measured, Validation, ValidationReport, stretches
from recd_plugins.values.stages import StageTimes

T = TypeVar("T")

# Steps of a breakdown: half are timed and half profiled.
PROFILED_STEPS = 10


@dataclass(frozen=True)
class Job:
    """What a rank is to do; travels to it by pickle.

    Attributes:
        registry: the registry file.
        side: with the registry's plugins, or the plain path that they are compared with.
        plugins_dir: a folder of plugin files.
        overrides: fields of the registry's ``training:`` section to set.
        device: ``cpu`` or ``cuda``.
        breakdown: profile some steps.
        sharding: a plugin in place of the first sharding entry's, as ``load_registry`` takes it.
        allowed: fields that may differ from those of the run that wrote the checkpoint.
        settings: values in place of the file's, as ``load_registry`` takes them.
        log_every: seconds between lines that say how far the run is; None for a live line where
            stderr is a terminal.
        topology: of the ranks, as they were measured; None for what the registry names.
    """

    registry: Path
    side: Side = "plugins"
    plugins_dir: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    breakdown: bool = False
    sharding: str | None = None
    allowed: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    log_every: float | None = None
    topology: TopologySpec | None = None


@dataclass(frozen=True)
class Result:
    """Figures of a run, the same on every rank.

    Attributes:
        samples_per_second: of all ranks, reading included, after the first steps; None for a run
            too short to tell.
        step_seconds: median wall time of a step, likewise.
        collective_bytes: bytes that all ranks together send in one step, by kind of collective;
            empty for a run too short to tell.
        ids_looked_up: ids that enter embedding lookups in one step, on all ranks; likewise None.
        peak_memory_bytes: while training, of the rank that needs most.
        losses: by step, the mean over ranks, from the run's first step, resumed or not.
        train: quality of predictions made before their samples were trained on, since the run was
            started or resumed; None where it was resumed at its end.
        test: quality on the test split, None where there is none.
        metrics: figures of the registry's metrics on the test split, by name.
        stages: seconds of a step by stage, the mean over ranks; None unless it was asked for, and
            for a run too short to tell.
        step_memory: bytes of a step above those at its start, of the rank that needs most; likewise
            None.
        sections: what table parts report, by name.
        groups: batches by the groups that a wrapper of the dataset sorts rows into, if any.
        stalls: what the timed steps waited for data; None for a run too short to tell.
        ingestion: figures of the ingestion by rank, of the training split; None without one.
        validation: of the test split while training went on; None where there was none.
        first_step: the step of the checkpoint that it was resumed at; 0 where it was started.
        prediction: of a step, next to what was timed; None where no costs were measured.
    """

    samples_per_second: float | None
    step_seconds: float | None
    collective_bytes: dict[str, float]
    ids_looked_up: float | None
    peak_memory_bytes: int
    losses: list[float]
    train: Quality | None
    test: Quality | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    stages: StageTimes | None = None
    step_memory: StepMemory | None = None
    sections: Mapping[str, Section] = field(default_factory=dict)
    groups: GroupReport | None = None
    stalls: StallReport | None = None
    ingestion: list[Mapping[str, float]] | None = None
    validation: ValidationReport | None = None
    first_step: int = 0
    prediction: Prediction | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON values; each section under its name, metrics beside the quality of the split."""
        reports = {
            **self.sections,
            "groups": self.groups,
            "stalls": self.stalls,
            "validation": self.validation,
            "prediction": self.prediction,
        }
        shown = {name: report and report.as_json() for name, report in reports.items()}
        values = asdict(replace(self, sections={}))
        del values["sections"], values["metrics"]
        if self.test is not None:
            values["test"] |= self.metrics
        return {**values, **shown}


def train(rank: int, world_size: int, job: Job) -> Result:
    """Train as the registry says. A collective call in a process group that exists.

    Raises:
        RecdError: the registry, the data or the checkpoint does not allow it.
        RunInterrupted: Ctrl-C or SIGTERM ended it before its time.
    """
    with Interrupts(rank, world_size) as interrupts:
        return _train(rank, world_size, job, interrupts)


def _train(rank: int, world_size: int, job: Job, interrupts: Interrupts) -> Result:
    activity.start()
    upstream_noise.silence()
    registry = load_registry(
        job.registry,
        plugins_dir=job.plugins_dir,
        sharding=job.sharding,
        settings=job.settings,
    )
    registry = registry.with_training(job.overrides)
    resume_fitted(registry)
    if job.side == "plugins":
        registry = resume_choice(registry, quiet=rank > 0)
    training = registry.training
    if training.workers:
        from recd_plugins.data.worker_processes import start_server

        start_server()
    device = device_of_rank(job.device)
    parts = assemble(registry, job.side, device, topology=job.topology)
    dmp, optimizer, prepared = parts.dmp, parts.optimizer, parts.prepared
    registry = prepared.registry
    pipeline = prepared.train_pipeline(dmp, optimizer, device)
    loader = prepared.dataloader(rank=rank, world_size=world_size, device=device)

    rates = LearningRates(optimizer, training.schedule)
    block = loader.batches_a_block()
    # The baseline of a comparison is no run of its own: nobody looks on, it leaves no checkpoints.
    called = callbacks_of(registry, parts.tables) if job.side == "plugins" else []
    callbacks = Callbacks(
        registry.path,
        called,
        rank,
        world_size,
        step_samples=training.batch_size * world_size,
        settings=(
            *job.settings,
            *(f"training.{name}={value}" for name, value in job.overrides.items()),
        ),
    )
    checkpoints = None
    if job.side == "plugins" and training.checkpoint.path is not None:
        identity = identity_of(registry, parts.tables) if rank == 0 else None
        fitted = fitted_state(registry) if rank == 0 else None
        checkpoints = checkpoints_of(training, identity, job.allowed, fitted)
    progress = Progress() if checkpoints is None else checkpoints.load(dmp, optimizer)
    activity.start(progress.step)
    if rank == 0 and job.side == "plugins":
        rest = rest_line(registry, len(loader), training.batch_size * world_size)
        for line in filter(None, (unused_line(registry), rest, prepared.chosen)):
            click.echo(str(line), err=True)
        click.echo(str(describe_tables(dmp)), err=True)
    if rank == 0 and progress.step:
        click.echo(f"resumed at step {progress.step} of {training.checkpoint.path}", err=True)
    if progress.reader is not None:
        try:
            loader.load_state_dict(progress.reader)
        except PluginError as error:
            raise RecdError(
                f"{training.checkpoint.path}: reader of progress.json, step {progress.step}: is no "
                f"position of this data ({error})"
            ) from error
    finite = FiniteRun(_name(job), checkpoints)
    if progress.step:
        finite.check_loaded(dmp, optimizer)
    first_step = progress.step
    ends_at = training.steps
    validation = None
    if job.side == "plugins" and training.validation is not None:
        validation = Validation(training.validation, progress.validation)
        if validation.stops:
            ends_at = progress.step
            if rank == 0:
                click.echo(f"{validation.report()}: there is nothing to train", err=True)

    record = Record(
        parts,
        finite,
        callbacks,
        interrupts,
        progress,
        validation,
        checkpoints,
        training.checkpoint.every,
    )

    def measured() -> Measured:
        with generators_kept():
            return evaluate(prepared, dmp, pipeline, rank, world_size, device, finite)

    source = BatchSource(loader, progress, training.epochs, ends_at)
    stalls = StallMeter(device)
    batches = callbacks.watched(stalls.metered(source))
    meter = Meter(dmp, device, channels_of(prepared.checked_parts, dmp.module), stalls)
    profile = StepProfile(device, warmup=0)
    first = progress.step + 1 + Meter.COUNTED_STEPS
    profiled = range(first, first + PROFILED_STEPS if job.breakdown else first)
    drift = None if parts.predicted is None else Drift(parts.predicted.stages, profile)
    predictions = Predictions()
    callbacks.start(progress, source.expected_steps, parts.tables)
    dmp.train()
    reset_peak(device)
    peak = 0
    newest: Measured | None = None
    with (
        loader,
        progress_bar(
            rank,
            job.sharding or job.side,
            progress.step,
            source.expected_steps,
            samples=training.batch_size * world_size,
            waiting=lambda: None if (recent := stalls.recent()) is None else recent.share,
            log_every=job.log_every,
        ) as advance,
    ):
        for stretch in stretches(
            batches, progress.step, training.validation if validation else None
        ):
            outputs = steps(pipeline, stretch, registry, dmp.module)
            while True:
                rates.set(progress.step)
                try:
                    with profile.step() if progress.step in profiled else meter.step():
                        loss, logits, labels = next(outputs)
                except StopIteration:
                    break
                rate = training.learning_rate * rates.factor(progress.step)
                progress = source.trained()
                activity.reached(progress.step)
                predictions.update(logits, labels)
                advance(loss)
                if drift is not None:
                    drift.look(meter)
                callbacks.trained(progress.step, loss, rate)
                record.add(loss)
                if validation is None or not validation.due(progress.step):
                    record.settle(progress)
            if validation is None or not validation.due(progress.step):
                continue
            # The pipeline is dry here: no batch is in flight that another model would have seen.
            meter.ran_dry()
            peak = max(peak, peak_bytes(device))
            with advance.paused():
                newest = measured()
                best = validation.add(progress.step, newest)
                if rank == 0:
                    click.echo(validation.line(newest), err=True)
            callbacks.evaluated(progress.step, "test", newest)
            dmp.train()
            reset_peak(device)
            record.settle(progress, best=best)
            if validation.stops:
                break
    if rank == 0 and first_step == progress.step > 0 and ends_at == training.steps:
        click.echo(f"{source.limit}: there is nothing to train", err=True)
    peak = max(peak, peak_bytes(device))
    # Before evaluation, which counts too.
    observed = observed_by(prepared.checked_parts, dmp.module, progress.step - first_step)
    record.look()
    record.save(progress)

    ranks = _from_every_rank((meter.per_step(), peak, observed, source.groups, meter.stalls()))
    counts = [count for count, *_ in ranks if count is not None]
    profiles = _from_every_rank((profile.stages(), profile.memory())) if profile.complete else []
    if newest is None or validation is None or validation.curve.steps[-1] != progress.step:
        newest = measured()
        callbacks.evaluated(progress.step, "test", newest)
    test, metrics = newest
    seconds = meter.step_seconds()
    stages = StageTimes.mean([stages for stages, _ in profiles]) if profiles else None
    samples = training.batch_size * world_size * len(seconds)
    chosen = {} if prepared.chosen is None else {prepared.chosen.name: prepared.chosen}
    result = Result(
        samples_per_second=samples / sum(seconds) if seconds else None,
        step_seconds=statistics.median(seconds) if seconds else None,
        collective_bytes=sum_by_kind([count.sent for count in counts]),
        ids_looked_up=sum(count.ids for count in counts) if counts else None,
        peak_memory_bytes=max(peak for _, peak, *_ in ranks),
        losses=record.losses,
        train=predictions.summarize(),
        test=test,
        metrics=metrics,
        stages=stages,
        step_memory=max(
            (memory for _, memory in profiles), key=lambda memory: memory.peak, default=None
        ),
        sections=chosen
        | sections_of(
            parts,
            sum_by_kind([count.sent_by_channel for count in counts]) if counts else None,
            [observed for _, _, observed, *_ in ranks],
            taken={*(field.name for field in fields(Result)), *chosen},
        ),
        groups=GroupReport.of([groups for *_, groups, _ in ranks], prepared.expected_groups()),
        stalls=StallReport.of(
            [waited for *_, waited in ranks],
            training.workers,
            block,
            None if registry.ingestion is None else registry.ingestion.plugin.name,
        ),
        ingestion=None if registry.ingestion is None else _from_every_rank(dict(loader.report())),
        validation=None if validation is None else validation.report(),
        first_step=first_step,
        prediction=_from_every_rank(None if drift is None else drift.of(meter, stages))[0],
    )
    callbacks.ended(progress.step, record.losses)
    close_kernels(dmp)
    return result


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


def _name(job: Job) -> str:
    plain = job.side == "plugins" and job.sharding is None
    return str(job.registry) if plain else f"{job.registry}, {job.sharding or job.side}"


def _from_every_rank(value: T) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone

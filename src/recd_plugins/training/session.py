"""Runs training jobs in new processes, or on the ranks of torchrun."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist
from ruamel.yaml import YAML

from recd_plugins.config import RunConfig, TrainingSpec
from recd_plugins.config.device import choose_device, device_of_rank
from recd_plugins.config.run_config import check_dataset, feature_steps
from recd_plugins.data.loader import check_ingestion
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.planning.plan_mode import measurement
from recd_plugins.planning.topologies import TopologySpec, machine_of, read_topology
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import DataError, RecdError, RegistryError
from recd_plugins.runtime.files import write_text
from recd_plugins.runtime.launch import (
    backend_for,
    join_torchrun,
    launch,
    torchrun_rank,
    torchrun_ranks_per_node,
)
from recd_plugins.runtime.plugin_modules import qualified
from recd_plugins.runtime.rank_agreement import (
    check_agreement,
    check_started_alike,
    from_rank_0,
    together,
)
from recd_plugins.runtime.signals import passed_on
from recd_plugins.runtime.watch import HangLimits, watched_by_each_other
from recd_plugins.training.evaluation import check_evaluation, splits_of
from recd_plugins.training.result import Result
from recd_plugins.training.run_folders import (
    RunSettings,
    checkpoint_in,
    find_run,
    new_run,
    resumed_run,
    runs_folder,
    runs_in,
)
from recd_plugins.training.trainer import Job, checkpoints_of, train

if TYPE_CHECKING:
    from recd_plugins.training.sharded_model import Variant

#: File next to the checkpoints with the topology that the run was planned for.
KEPT = "topology.yaml"


@dataclass(frozen=True)
class Session:
    """A run config with prepared data; ``train`` can be called any number of times.

    ``folder`` is the run folder, such as ``runs/clicks/3``, if the registry configures one.
    """

    registry: RunConfig
    job: Job
    rank: int
    world_size: int
    ranks_per_node: int
    hang_limits: HangLimits
    folder: Path | None = None

    def train(self, variant: Variant | None = None, sharding: str | None = None) -> Result:
        """Train on all ranks. ``sharding`` is the plugin to use in the first sharding entry.

        In a comparison, progress lines start with ``variant`` and ``sharding``.
        """
        label = sharding or variant or self.job.label
        sharding = sharding or self.job.sharding
        job = replace(self.job, variant=variant or "plugins", sharding=sharding, label=label)
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
    job: Job,
    registry: RunConfig | None = None,
    *,
    resume: bool = False,
    alike: Mapping[str, Any] | None = None,
    run: int | None = None,
) -> Iterator[Session]:
    """Load a run config, join the ranks of torchrun if there are any, and prepare the data.

    Args:
        job: the run. Its device and text are replaced.
        registry: the config loaded from ``job.registry`` with ``job.sharding`` and
            ``job.settings``; None loads the file.
        alike: further options that must be equal on all ranks of torchrun.
        run: number of the run to resume; None resumes the newest one.
    """
    config = job.load() if registry is None else registry.with_training(job.overrides)
    device = choose_device(config, verbose=job.verbose)
    check_ingestion(config)
    check_evaluation(config)
    job = replace(job, device=device, text=config.text)
    training = config.training
    limits = hang_limits(lambda: config)

    def in_own_folder(folder: Path | None) -> tuple[RunConfig, Job]:
        if folder is None:
            return config, job
        into = checkpoint_in(config, folder)
        return config.with_training(into), replace(job, overrides={**job.overrides, **into})

    if torchrun_rank() is None:
        ranks_per_node = training.ranks_per_node or training.ranks
        if training.topology is not None:  # refused if it does not suit the ranks
            machine_of(training, training.ranks, ranks_per_node, torch.device(device))
        with _run_folder(config, job, resume, run) as folder:
            config, job = in_own_folder(folder)
            with _prepared(config, training.ranks, resume):
                yield Session(config, job, 0, training.ranks, ranks_per_node, limits, folder)
        return
    ranks_per_node = torchrun_ranks_per_node()
    with (
        join_torchrun(backend_for(device), limits.collectives) as (rank, world_size),
        watched_by_each_other(rank, world_size, limits),
        ExitStack() as stack,
    ):
        options = {"--resume": resume, "--breakdown": job.breakdown}
        check_started_alike(device, {**options, **(alike or {})})
        if training.topology is not None:
            machine_of(training, world_size, ranks_per_node, torch.device(device))
        of_rank_0, *_ = together(
            lambda: (
                stack.enter_context(_run_folder(config, job, resume, run)) if rank == 0 else None
            )
        )
        config, job = in_own_folder(of_rank_0)
        if rank == 0:
            with doing("preparing the data"):
                stack.enter_context(_prepared(config, world_size, resume))
        dist.barrier()
        topology = topology_at_start(
            config.training, device, ranks_per_node, resume=resume, plugins_dir=job.plugins_dir
        )
        job = replace(job, topology=topology)
        yield Session(config, job, rank, world_size, ranks_per_node, limits, of_rank_0)


@contextmanager
def _run_folder(
    registry: RunConfig, job: Job, resume: bool, number: int | None
) -> Iterator[Path | None]:
    """Yield the folder of this run: a new one, or the one to resume; None if not configured."""
    folder = runs_folder(registry)
    settings = RunSettings.of(registry, job.settings, job.overrides, job.plugins_dir)
    if folder is None:
        yield None
    elif resume and (number is not None or runs_in(folder)):
        with resumed_run(find_run(folder, number, trained=False), settings) as run:
            yield run
    else:
        if resume:
            click.echo(f"{folder}: there is no run to resume, so a new run starts", err=True)
        with new_run(folder, settings) as new:
            yield new


def this_command(registry: Path, *, resume: bool) -> str:
    """Return the command line that started this training, to show in messages."""
    program, *words = sys.argv
    if Path(program).name != "recd":
        words = ["run", str(registry)]
    words = [word for word in words if word != "--resume"]
    launcher = "" if torchrun_rank() is None else "the same launcher with "
    return launcher + shlex.join(["recd", *words, *(["--resume"] if resume else [])])


def hang_limits(registry: Callable[[], RunConfig]) -> HangLimits:
    """Return the timeouts for ranks that hang, with the command to resume afterwards."""
    training = registry().training

    def advice() -> str:
        checkpoints = checkpoints_of(registry().training)
        newest = None if checkpoints is None else checkpoints.newest()
        command = this_command(registry().path, resume=newest is not None)
        if newest is None:
            return f"There is no checkpoint. To start again, run: {command}"
        return f"The newest checkpoint is {newest}. To resume from this checkpoint, run: {command}"

    return HangLimits(training.hang_notice, training.hang_timeout, advice)


@contextmanager
def _prepared(registry: RunConfig, world_size: int, resume: bool) -> Iterator[None]:
    checkpoints = checkpoints_of(registry.training)
    if checkpoints is None and resume:
        raise RecdError(
            f"{registry.path}: --resume needs training.checkpoint.runs, which is not set. Set "
            "training.checkpoint.runs, or remove --resume."
        )
    with nullcontext() if checkpoints is None else checkpoints.reserve(resume):
        with passed_on(()):  # no ranks yet: a signal stops the preparation cleanly
            check_dataset(registry)
            dataset = wrapped_dataset(registry)
            try:
                dataset.prepare()
            except DataError as error:
                # A changed role of a column can also cause problems in other sections.
                try:
                    feature_steps(registry, dataset.schema())
                except RegistryError as others:
                    problem = registry.problem(("dataset",), str(error))
                    raise RegistryError([problem, *others.problems]) from error
                raise
            size = registry.training.batch_size
            for split in splits_of(registry):
                # Evaluation also reads rows that do not fill a batch.
                ranks, rows = (world_size, size) if split == "train" else (1, 1)
                dataset.reader(rank=0, world_size=ranks, batch_size=rows, split=split)
        yield


def topology_at_start(
    training: TrainingSpec,
    device: str,
    ranks_per_node: int,
    *,
    resume: bool,
    plugins_dir: Path | None = None,
) -> TopologySpec | None:
    """Measure the topology of a run on several nodes. All ranks must call this.

    A resumed run reads the topology that was saved next to its checkpoints, so that its plan stays
    the same. It measures again if the number of nodes or ranks has changed. Return None for one
    node, for a topology set in ``training``, or if no plugin can measure.
    """
    nodes = dist.get_world_size() // ranks_per_node
    if training.topology is not None or nodes == 1:
        return None
    folder = training.checkpoint.path
    path = None if folder is None else Path(folder) / KEPT
    first = dist.get_rank() == 0
    spec: TopologySpec | None = None
    if first and resume and path is not None and path.exists():
        kept = read_topology(path)
        if (kept.nodes, kept.ranks_per_node, kept.device) == (nodes, ranks_per_node, device):
            click.echo(f"using the topology in {path}, which the earlier run measured", err=True)
            spec = kept
    if (found := from_rank_0(spec)) is not None:
        return found
    measured_by = measurement(plugins_dir)
    by = None if measured_by is None else qualified(type(measured_by))
    check_agreement("measuring the nodes", {"the plugin that measures": by})
    if measured_by is None:
        return None
    if first:
        click.echo(f"measuring the network between {nodes} nodes", err=True)
    with doing("measuring the cluster"):
        spec = measured_by.cluster(device_of_rank(device))
    if first:
        click.echo(
            f"measured {spec.inter_node_bandwidth / 1e6:,.1f} MB/s per rank between nodes. To skip "
            "this measurement, set training.topology to machine or to a file of recd calibrate.",
            err=True,
        )
        if path is not None:
            write_topology(path, spec, "Measured at the start of the run.")
    return from_rank_0(spec)


def write_topology(path: Path, spec: TopologySpec, comment: str) -> None:
    """Write a topology atomically, in the format of ``read_topology``."""
    text = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    values = spec.model_dump(exclude_none=True)
    # A required field is last, so that a truncated file is refused.
    values["device"] = values.pop("device")
    yaml.dump(values, text)
    write_text(path, f"# {comment}\n{text.getvalue()}")

"""What a training run does about ranks and readers that hang."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from recd_plugins.distributed.hang_watch import HangError, HangLimits, HangWatch
from recd_plugins.distributed.heartbeat import Heart, connect
from recd_plugins.distributed.lost_ranks import StoreWatch, is_lost_connection, who_is_lost
from recd_plugins.errors import SetupError
from recd_plugins.processes import kill_stopped_below
from recd_plugins.registry import Registry
from recd_plugins.training.interrupts import this_command
from recd_plugins.training.job import Job
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import checkpoints_of, train


def hang_limits(registry: Registry) -> HangLimits:
    """How long a run of this registry waits."""
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


def train_beating(rank: int, world_size: int, job: Job, interval: float) -> Result:
    """``train`` on a rank that another process watches."""
    with Heart(rank, interval):
        return train(rank, world_size, job)


@contextmanager
def watched_by_each_other(rank: int, world_size: int, limits: HangLimits) -> Iterator[None]:
    """Ranks of ``torchrun``: each watches all, from when it gets no further itself."""
    if world_size == 1:  # nobody is there to say it
        yield
        return
    watch: HangWatch | None = None

    def look(quiet: float) -> None:
        nonlocal watch
        if watch is None:
            watch = HangWatch(
                connect(), world_size, limits, lambda text: click.echo(text, err=True)
            )
        if quiet < limits.notice / 2 and not watch.told:
            return
        try:
            watch.look(teller=rank)
        except HangError as error:
            _end(watch, error)

    def end(text: str) -> None:
        _end(watch, HangError(f"rank {rank}: {text}. The run is ended. {limits.advice()}"))

    with (
        Heart(rank, limits.interval, look) as heart,
        StoreWatch(limits, lambda: heart.answered, end),
    ):
        try:
            yield
        except Exception as error:
            if not is_lost_connection(error):
                raise
            lost = who_is_lost(connect, rank, world_size, limits)
            raise SetupError(f"rank {rank} was left: {lost}. {limits.advice()}") from error


def _end(watch: HangWatch | None, error: HangError) -> None:
    """End this process, whose training thread waits, and those that cannot end by themselves."""
    kill_stopped_below(os.getpid())
    for process in [] if watch is None else watch.stopped_here():
        kill_stopped_below(process)
        with suppress(ProcessLookupError):  # another rank was faster
            os.kill(process, signal.SIGKILL)
    if str(error):
        click.secho(str(error), fg="red", err=True)
    sys.stdout.flush()
    os._exit(1)

"""Ranks of torchrun that watch each other: nobody waits without a word, or for ever."""

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
from recd_plugins.errors import RecdError, SetupError
from recd_plugins.processes import kill_stopped_below


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
        except RuntimeError:  # its connection is broken, as the heart's: both are made anew
            watch = None
            raise

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
            # It names a checkpoint or a plugin, whose fault it may be where no rank is missed.
            said = f" ({error})" if isinstance(error, RecdError) else ""
            raise SetupError(f"rank {rank} was left: {lost}{said}. {limits.advice()}") from error


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

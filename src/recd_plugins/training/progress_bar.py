"""Shows the progress of a run on rank 0: a live line on a terminal, else periodic log lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from recd_plugins.data.stalls import Stalls
from recd_plugins.interfaces.dataset import ENDLESS
from recd_plugins.report.output import error_console

#: Seconds between two lines of a log file, and between two draws of a live line.
LOG_EVERY, _LIVE_EVERY = 10.0, 1.0
# Number of updates over which the current speed is measured.
_UPDATES = 20


class ProgressLine:
    """Shows the progress of a run. Call it with the loss of each step.

    Prints log lines, or updates the live bar ``bar``, at most every ``every`` seconds. The run
    began after step ``done`` and ends at step ``total``. A step has ``samples`` rows over all
    ranks; None hides the speed. ``waiting`` returns recent data stalls (waits for batches),
    and ``lag`` the number of rows behind the end of a stream. A stream has no total.
    """

    def __init__(
        self,
        name: str,
        done: int,
        total: int,
        samples: int | None = None,
        waiting: Callable[[], Stalls | None] = lambda: None,
        every: float = float("inf"),
        bar: Progress | None = None,
        lag: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._name, self._done, self._total = name, done, total
        self._samples, self._waiting, self._every, self._bar = samples, waiting, every, bar
        self._lag = lag
        self._paused = 0.0
        self._loss: Tensor | None = None
        self._shown = self._now()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_UPDATES)

    def __call__(self, loss: Tensor) -> None:
        self._done += 1
        self._loss = loss
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        if not self._marks:  # the first step compiles and warms up
            self._marks.append((self._now(), self._done))
        # Reading the loss waits for the device, so not at every step.
        if self._now() - self._shown >= self._every:
            self.update()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the live bar in this context, and exclude its time from the speed."""
        start = time.monotonic()
        if self._bar is not None:
            self._bar.stop()
        yield
        self._paused += time.monotonic() - start
        if self._bar is not None:
            self._bar.start()

    def update(self) -> None:
        """Update the live bar, or print a log line."""
        now = self._shown = self._now()
        if self._loss is None:
            return
        (start, before), *_ = self._marks
        self._marks.append((now, self._done))
        each = (now - start) / (self._done - before) if self._done > before else 0.0
        loss, waiting = self._loss.item(), self._waiting()
        speed = self._samples / each if each and self._samples is not None else None
        endless, lag = self._total >= ENDLESS, self._lag()
        left = max(0, self._total - self._done) * each if each and not endless else None
        if self._bar is not None:
            live = [f"loss={loss:.4f}"] + ([] if speed is None else [f"{speed:,.0f} rows/s"])
            live += [] if left is None else [f"eta {timedelta(seconds=round(left))}"]
            live += [] if lag is None else [f"lag {lag:,}"]
            self._bar.update(self._bar.task_ids[0], said=" ".join(live))
            return
        of = "" if endless else f" of={self._total}"
        words = [f"{self._name}: step={self._done}{of} loss={loss:.6g}"]
        words += [] if speed is None else [f"samples_per_second={speed:.0f}"]
        words += [] if left is None else [f"eta_seconds={left:.0f}"]
        words += [] if waiting is None else [f"waiting={waiting.share:.3f}"]
        words += [] if lag is None else [f"lag={lag}"]
        click.echo(" ".join(words), err=True)

    def _now(self) -> float:
        return time.monotonic() - self._paused


@contextmanager
def progress_bar(
    rank: int,
    name: str,
    done: int,
    total: int,
    *,
    samples: int | None = None,
    waiting: Callable[[], Stalls | None] = lambda: None,
    log_every: float | None = None,
    lag: Callable[[], int | None] = lambda: None,
) -> Iterator[ProgressLine]:
    """Yield a ``ProgressLine``, which shows the progress only on rank 0."""
    if rank != 0:
        yield ProgressLine(name, done, total)
        return
    console = error_console()
    if log_every is not None or not console.is_terminal:
        every = log_every or LOG_EVERY
        log = ProgressLine(name, done, total, samples, waiting, every, lag=lag)
        start = time.monotonic()
        yield log
        if samples is not None or time.monotonic() - start > every:
            log.update()
        return
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console) as bar:
        bar.add_task(name, total=None if total >= ENDLESS else total, completed=done, said="")
        live = ProgressLine(name, done, total, samples, waiting, _LIVE_EVERY, bar, lag)
        yield live
        live.update()

"""Progress of a run on rank 0: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from torch import Tensor

from recd_plugins.report.output import error_console

#: Seconds between two lines of a log file, and between two draws of a live line.
LOG_EVERY, _LIVE_EVERY = 10.0, 1.0
# The present speed is that of so many updates.
_UPDATES = 20


class ProgressLine:
    """Progress of steps, called with the loss of each; the base class shows nothing."""

    def __init__(
        self,
        name: str,
        done: int,
        total: int,
        samples: int | None = None,
        waiting: Callable[[], float | None] = lambda: None,
        every: float = float("inf"),
    ) -> None:
        self._name, self._done, self._total = name, done, total
        self._samples, self._waiting, self._every = samples, waiting, every
        self._paused = 0.0
        self._loss: Tensor | None = None
        self._shown = self._now()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_UPDATES)

    def __call__(self, loss: Tensor) -> None:
        self._done += 1
        self._loss = loss
        if not self._marks:  # the first step compiles and warms up
            self._marks.append((self._now(), self._done))
        # Reading the loss waits for the device, so not at every step.
        if self._now() - self._shown >= self._every:
            self.update()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of this context out of the speed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - start

    def update(self) -> None:
        """Show the progress."""
        now = self._shown = self._now()
        if self._loss is None:
            return
        (start, before), *_ = self._marks
        self._marks.append((now, self._done))
        each = (now - start) / (self._done - before) if self._done > before else None
        self.show(self._loss.item(), each, self._waiting())

    def show(self, loss: float, step_seconds: float | None, waiting: float | None) -> None:
        """Show loss, seconds of a step, and the share of time waiting for data."""

    def _now(self) -> float:
        return time.monotonic() - self._paused

    def _left(self, step_seconds: float) -> float:
        return max(0, self._total - self._done) * step_seconds


class _Log(ProgressLine):
    def show(self, loss: float, step_seconds: float | None, waiting: float | None) -> None:
        words = [f"step={self._done}", f"of={self._total}", f"loss={loss:.6g}"]
        if step_seconds:
            if self._samples is not None:
                words.append(f"samples_per_second={self._samples / step_seconds:.0f}")
            words.append(f"eta_seconds={self._left(step_seconds):.0f}")
        if waiting is not None:
            words.append(f"waiting={waiting:.3f}")
        click.echo(f"{self._name}: {' '.join(words)}", err=True)


class _Live(ProgressLine):
    bar: RichProgress

    def __call__(self, loss: Tensor) -> None:
        super().__call__(loss)
        self.bar.update(self.bar.task_ids[0], completed=self._done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.bar.live.transient = True
        self.bar.stop()
        self.bar.live.transient = False
        with super().paused():
            yield
        self.bar.start()

    def show(self, loss: float, step_seconds: float | None, waiting: float | None) -> None:
        words = [f"loss {loss:.4f}"]
        if step_seconds and self._samples is not None:
            words.append(f"{self._samples / step_seconds:,.0f} samples/s")
        if waiting is not None:
            words.append(f"waiting {waiting:.0%}")
        if step_seconds:
            words.append(f"ETA {timedelta(seconds=round(self._left(step_seconds)))}")
        self.bar.update(self.bar.task_ids[0], said=", ".join(words))


@contextmanager
def progress_bar(
    rank: int,
    name: str,
    done: int,
    total: int,
    *,
    samples: int | None = None,
    waiting: Callable[[], float | None] = lambda: None,
    log_every: float | None = None,
) -> Iterator[ProgressLine]:
    """Yield a ``ProgressLine`` that shows the progress on rank 0."""
    if rank != 0:
        yield ProgressLine(name, done, total)
        return
    console = error_console()
    if log_every is not None or not console.is_terminal:
        every = log_every or LOG_EVERY
        log = _Log(name, done, total, samples, waiting, every)
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
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=console) as bar:
        bar.add_task(name, total=total, completed=done, said="")
        live = _Live(name, done, total, samples, waiting, _LIVE_EVERY)
        live.bar = bar
        yield live
        live.update()

"""A progress bar on rank 0, and nothing on the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

_SECONDS_BETWEEN_LOSSES = 1.0


@contextmanager
def progress_bar(rank: int, name: str, done: int, total: int) -> Iterator[Callable[[Tensor], None]]:
    """Yields what to call after each step with its loss."""
    if rank != 0:
        yield lambda loss: None  # noqa: ARG005
        return
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=total, completed=done, loss="-")

        shown = 0.0
        last: Tensor | None = None

        def advance(loss: Tensor) -> None:
            nonlocal shown, last
            progress.advance(task)
            last = loss
            # Reading the loss waits for the device, so not at every step.
            if time.monotonic() - shown > _SECONDS_BETWEEN_LOSSES:
                shown = time.monotonic()
                progress.update(task, loss=f"{loss.item():.4f}")

        yield advance
        if last is not None:
            progress.update(task, loss=f"{last.item():.4f}")

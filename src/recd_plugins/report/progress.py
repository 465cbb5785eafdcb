"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Adds a bar with this name and number of rows. Returns a function that advances the bar by rows.
AddBar = Callable[[str, int | None], Callable[[int], None]]


@contextmanager
def progress_bars() -> Iterator[AddBar]:
    """Show progress bars on stderr, one for each call of the yielded function ``AddBar``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from recd_plugins.report.output import error_console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=error_console()) as bars:

        def add(name: str, num_rows: int | None) -> Callable[[int], None]:
            task = bars.add_task(name, total=num_rows)
            return lambda rows: bars.advance(task, rows)

        yield add
        for task in bars.tasks:
            bars.update(task.id, total=task.completed)


@contextmanager
def row_progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of rows. Yields a function that advances the bar by some rows."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from recd_plugins.report.output import error_console

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = error_console()
    # In a file, the bar would leave an empty line.
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda rows: bar.advance(task, rows)

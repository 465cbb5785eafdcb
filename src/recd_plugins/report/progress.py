"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Adds a bar with this name and number of rows. Returns a function that advances the bar by rows.
AddBar = Callable[[str, int | None], Callable[[int], None]]


@contextmanager
def progress_bars(*, transient: bool = False) -> Iterator[AddBar]:
    """Show progress bars on stderr, one for each call of the yielded function ``AddBar``.

    If ``transient``, show them only on a terminal, with times, and remove them at the end.
    """
    from rich import progress

    from recd_plugins.report.output import error_console

    text = progress.TextColumn("{task.description}", markup=False)
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn()) if transient else ()
    columns = (text, progress.BarColumn(), progress.MofNCompleteColumn(), *times)
    console = error_console()
    hidden = transient and not console.is_terminal
    with progress.Progress(*columns, console=console, transient=transient, disable=hidden) as bars:

        def add(name: str, num_rows: int | None) -> Callable[[int], None]:
            task = bars.add_task(name, total=num_rows)
            return lambda rows: bars.advance(task, rows)

        yield add
        for task in bars.tasks:
            bars.update(task.id, total=task.completed)


@contextmanager
def row_progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a transient bar of rows. Yields a function that advances the bar by some rows."""
    with progress_bars(transient=True) as add:
        yield add(what, total)

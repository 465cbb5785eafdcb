"""What the subcommands of ``recd profile`` share: options, and what they show and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from recd_plugins.api import (
    COUNT_FROM_0,
    OUTPUT,
    RecdError,
    error_console,
    output_console,
    report_options,
    write_json,
)

if TYPE_CHECKING:
    from recd_plugins.api import AccessProfile

_Command = TypeVar("_Command", bound=Callable[..., Any])


shown = report_options(
    "Write the figures here.", "Write a picture of the share of accesses by rows here"
)


def written(command: _Command) -> _Command:
    """Where the profile goes."""
    for option in (
        click.option("--force", is_flag=True, help="Replace FILE where it is there."),
        click.option(
            "-o", "--output", type=OUTPUT, required=True, metavar="FILE", help="Write it here."
        ),
    ):
        command = option(command)
    return shown(command)


def of_distribution(command: _Command) -> _Command:
    """The table of a profile that comes from no data."""
    for option in (
        click.option(
            "--in-order",
            is_flag=True,
            help="Row 0 is read most, row 1 next, and so on; else rows are shuffled.",
        ),
        click.option(
            "--seed",
            type=COUNT_FROM_0,
            help="Shuffles rows; 0 without it.",
        ),
        click.option("--table", required=True, metavar="NAME", help="Its name in the model."),
    ):
        command = option(command)
    return command


def seed_of(seed: int | None, in_order: bool) -> int | None:
    """What rows are shuffled by; None where they are not."""
    if in_order and seed is not None:
        raise click.UsageError("--seed shuffles rows, and --in-order leaves them; take one of them")
    return None if in_order else seed or 0


@contextmanager
def in_memory(rows: int) -> Iterator[None]:
    """A context that makes a profile of so many rows, or says that there is no room for them."""
    try:
        yield
    except MemoryError as error:
        raise RecdError(f"no memory for a profile of {rows:,} rows; name fewer") from error


def finish(
    made: AccessProfile, output: Path, json_path: Path | None, plot_path: Path | None
) -> None:
    """Write a profile and show it."""
    with error_console().status(f"writing {output}"):
        made.save(output)
    show(made, json_path, plot_path)


def show(made: AccessProfile, json_path: Path | None, plot_path: Path | None) -> None:
    """Print what a profile says of its tables, and write it as JSON and as a picture."""
    from recd_plugin_tuning.profile_report import as_json, plot, render

    if json_path is not None:
        write_json(json_path, as_json(made))
    if plot_path is not None:
        plot(made, plot_path)
    output_console().print(render(made))

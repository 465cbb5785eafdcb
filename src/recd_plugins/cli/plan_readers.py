"""``recd plan --readers``: how many readers keep the trainer busy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from recd_plugins.cli.options import FiniteFloat
from recd_plugins.files import write_json

if TYPE_CHECKING:
    from recd_plugins.registry import Registry

_Command = TypeVar("_Command", bound=Callable[..., Any])


def reader_options(command: _Command) -> _Command:
    """``--readers``, and what belongs to it."""
    for option in (
        click.option(
            "--stall-target",
            type=FiniteFloat(min=0, max=1, min_open=True, max_open=True),
            metavar="SHARE",
            help="With --readers: of its time, what the trainer may wait for data; 0.05 without "
            "it.",
        ),
        click.option(
            "--readers",
            is_flag=True,
            help="Plan readers instead: measure one reader and the trainer on this machine, and "
            "say how many readers keep the trainer from waiting.",
        ),
    ):
        command = option(command)
    return command


def check_reader_options(
    readers: bool, stall_target: float | None, others: Mapping[str, object]
) -> None:
    """Refuse options that do not go together.

    Args:
        readers, stall_target: as given.
        others: options of other plans by name, false or None where they are not given.
    """
    if stall_target is not None and not readers:
        raise click.UsageError("--stall-target is for --readers")
    given = [name for name, value in others.items() if value]
    if readers and given:
        raise click.UsageError(
            f"--readers measures this machine as the registry uses it: leave out "
            f"{' and '.join(given)}"
        )


def plan_readers(
    registry: Registry,
    plugins_dir: Path | None,
    batch_size: int,
    stall_target: float | None,
    *,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure, print and write.

    Args:
        registry: not prepared.
        plugins_dir: of the registry.
        batch_size: rows of a rank.
        stall_target: of its time, what the trainer may wait; None takes ``STALL_TARGET``.
        json_path, plot_path: what is written, if anything.
    """
    from recd_plugins.planning.readers.report_plot import plot
    from recd_plugins.planning.readers.report_text import render
    from recd_plugins.planning.readers.rule import STALL_TARGET
    from recd_plugins.planning.readers.study import study_readers

    target = STALL_TARGET if stall_target is None else stall_target
    with Console(stderr=True).status("preparing the data") as status:
        plan = study_readers(registry, plugins_dir, batch_size, target, status.update)
    Console().print(render(plan))
    if json_path is not None:
        write_json(json_path, plan.as_json())
    if plot_path is not None:
        plot(plan, plot_path)

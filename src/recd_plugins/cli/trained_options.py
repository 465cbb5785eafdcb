"""Options of commands that take a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from recd_plugins.cli.options import AT_LEAST_1

_Command = TypeVar("_Command", bound=Callable[..., Any])

CHECKPOINT = click.option(
    "--checkpoint",
    default="newest",
    show_default=True,
    metavar="PATH|newest|best",
    help="A checkpoint, or a folder of some, of which the newest is taken; newest and best are "
    "those of training.checkpoint.path.",
)
RANKS = click.option("--ranks", type=AT_LEAST_1, help="Overrides training.ranks.")
BATCH_SIZE = click.option(
    "--batch-size", type=AT_LEAST_1, help="Overrides training.batch_size: rows of a rank at a time."
)


def overrides(**values: Any) -> dict[str, Any]:
    """Fields of the ``training`` section that options set."""
    return {name: value for name, value in values.items() if value is not None}

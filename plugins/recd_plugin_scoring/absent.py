"""What is said where a model is scored by without the data that it was trained on."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api.registry import RunConfig
from recd_plugins.api.training import AbsentData


def say_absent(registry: RunConfig, checkpoint: Path) -> None:
    """Say why the data is not there, and where the columns come from; nothing where it is."""
    if isinstance(registry.dataset, AbsentData):
        click.echo(
            "Without the data that it was trained on, which cannot be read "
            f"({registry.dataset.error}): the columns are those of {checkpoint}",
            err=True,
        )
        if not registry.dataset.knows_kinds:
            click.echo(
                f"{checkpoint} is of an older version, which did not keep whether ids were texts "
                "or numbers: see to it that they are what they were",
                err=True,
            )

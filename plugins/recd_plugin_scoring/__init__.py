"""What takes a trained model: its quality, scores of tables, a program to serve, rows of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

REQUIRES_API = 4


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_scoring.commands.embeddings import embeddings
    from recd_plugin_scoring.commands.evaluate import evaluate
    from recd_plugin_scoring.commands.export import export
    from recd_plugin_scoring.commands.predict import predict

    for command in (evaluate, predict, export, embeddings):
        cli.add_command(command)

"""Command ``recd example-hello``."""

import click


@click.command("example-hello")
def hello() -> None:
    """Print that the example plugin is installed."""
    click.echo("recd-plugin-example is installed")

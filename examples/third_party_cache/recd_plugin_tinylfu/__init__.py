"""An example package with the cache policy TinyLFU, a cache plugin and a command."""

from collections.abc import Sequence

import click

from recd_plugin_tinylfu.cache import TinyLfuCache
from recd_plugins.api import Cache, hookimpl

REQUIRES_API = 6


@hookimpl
def register_caches() -> Sequence[type[Cache]]:
    return [TinyLfuCache]


@click.command("tinylfu-memory")
@click.argument("rows", type=click.IntRange(min=0))
def memory(rows: int) -> None:
    """Print the memory of TinyLFU's read counters for a cache of ROWS rows."""
    from recd_plugin_tinylfu.policy import sketch_bytes

    click.echo(f"{sketch_bytes(rows):,} bytes")


@hookimpl
def register_commands(cli: click.Group) -> None:
    cli.add_command(memory)

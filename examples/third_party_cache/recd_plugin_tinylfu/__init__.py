"""A package with a cache policy of its own, TinyLFU, the cache that has it, and a command."""

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
    """Tell what TinyLFU takes to count reads, for a cache of so many ROWS."""
    from recd_plugin_tinylfu.policy import sketch_bytes

    click.echo(f"{sketch_bytes(rows):,} bytes")


@hookimpl
def register_commands(cli: click.Group) -> None:
    cli.add_command(memory)

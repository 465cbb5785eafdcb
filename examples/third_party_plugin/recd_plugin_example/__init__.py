"""An example package with a preprocessing plugin, a pooling plugin and a command."""

from collections.abc import Sequence

import click

from recd_plugin_example.drop_repeats import DropRepeats
from recd_plugin_example.hello import hello
from recd_plugin_example.recency import Recency
from recd_plugins.api import Pooling, Preprocessing, hookimpl


@hookimpl
def register_preprocessing() -> Sequence[type[Preprocessing]]:
    return [DropRepeats]


@hookimpl
def register_poolings() -> Sequence[type[Pooling]]:
    return [Recency]


@hookimpl
def register_commands(cli: click.Group) -> None:
    cli.add_command(hello)

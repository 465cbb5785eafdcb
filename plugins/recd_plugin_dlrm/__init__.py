"""Datasets of DLRM (arXiv 1906.00091), and synthetic id traces with the locality of real traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import Dataset

REQUIRES_API = 2


@hookimpl
def register_datasets() -> Sequence[type[Dataset]]:
    from recd_plugin_dlrm.criteo.dataset import Criteo
    from recd_plugin_dlrm.random_rows import Random
    from recd_plugin_dlrm.trace.dataset import Trace

    return [Criteo, Random, Trace]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_dlrm.criteo.commands import criteo
    from recd_plugin_dlrm.trace.commands import trace

    cli.add_command(criteo)
    cli.add_command(trace)

"""Implicit feedback: negative sampling, retrieval and ranking models, and ranking metrics."""

from __future__ import annotations

from collections.abc import Sequence

import click

from recd_plugin_ranking.metrics import RankingMetrics
from recd_plugin_ranking.models import SasRec, TwoTower
from recd_plugin_ranking.negatives import Negatives
from recd_plugins.api import Plugin, hookimpl

REQUIRES_API = 5


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Negatives, TwoTower, SasRec, RankingMetrics]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_ranking.commands import rank_command

    cli.add_command(rank_command)

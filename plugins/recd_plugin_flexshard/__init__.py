"""FlexShard (arXiv 2301.02959): shards tables row-wise and copies frequent rows to more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import Sharding, plan_modes

REQUIRES_API = 2


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    from recd_plugin_flexshard.sharding import Joint, ThreeTier, TwoTier

    return [TwoTier, ThreeTier, Joint]


@hookimpl
def register_plans() -> Sequence[type[plan_modes.PlanMode]]:
    from recd_plugin_flexshard.commands import TiersPlan

    return [TiersPlan]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_flexshard.commands import simulate

    cli.add_command(simulate)

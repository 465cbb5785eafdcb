"""Options that several commands have, in the same words."""

from __future__ import annotations

import click

from recd_plugins.api import cli_options


def _named(_ctx: click.Context, _param: click.Parameter, name: str | None) -> str | None:
    """Refuse an empty name, which would pass for none given."""
    if name == "":
        raise click.BadParameter("an empty name; leave it out for the default")
    return name


session = click.option(
    "--session",
    callback=_named,
    help="The column of the session.  [default: session_id; a dataset knows its own]",
)
timestamp = click.option(
    "--timestamp",
    callback=_named,
    help="The column of the time.  [default: ts; a dataset knows its own]",
)
nulls = click.option(
    "--nulls",
    type=click.Choice(["error", "empty"]),
    default="error",
    show_default=True,
    help="What a null in place of a list of ids is.",
)
row_group_rows = click.option(
    "--row-group-rows",
    type=cli_options.AT_LEAST_1,
    default=8192,
    show_default=True,
    help="Most rows of a row group, which ends where a session ends.",
)
force = click.option("--force", is_flag=True, help="Replace DST where it is a table.")
figures = click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT,
    help="Write figures here.",
)

"""Options shared by several commands."""

from __future__ import annotations

import click

from recd_plugins.api import cli_options

session = click.option(
    "--session",
    help="Session column.  [default: session_id; a dataset defines its own]",
)
timestamp = click.option(
    "--timestamp",
    help="Time column.  [default: ts; a dataset defines its own]",
)
nulls = click.option(
    "--nulls",
    type=click.Choice(["error", "empty"]),
    default="error",
    show_default=True,
    help="How to handle a null instead of a list of ids.",
)
row_group_rows = click.option(
    "--row-group-rows",
    type=cli_options.AT_LEAST_1,
    default=8192,
    show_default=True,
    help="Maximum number of rows in a row group. A row group ends at a session boundary.",
)
force = click.option("--force", is_flag=True, help="Replace DST if it is a table.")
figures = click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT,
    help="Write the figures as JSON to this file.",
)

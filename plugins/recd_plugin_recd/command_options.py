"""Command-line options that several commands share."""

from __future__ import annotations

import click

from recd_plugins.api import cli_options

session = click.option(
    "--session",
    help="Column of the session id.  [default: session_id; not for registry files]",
)
timestamp = click.option(
    "--timestamp",
    help="Column of the time.  [default: ts; not for registry files]",
)
nulls = click.option(
    "--nulls",
    type=click.Choice(["error", "empty"]),
    default="error",
    show_default=True,
    help="What to do with a null instead of a list of ids: fail, or use an empty list.",
)
row_group_rows = click.option(
    "--row-group-rows",
    type=cli_options.AT_LEAST_1,
    default=8192,
    show_default=True,
    help="Maximum number of rows in a row group. A row group ends at a session boundary.",
)
force = click.option("--force", is_flag=True, help="Replace DST if it is an existing table.")
figures = click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT,
    help="Write statistics of the result as JSON to this file.",
)

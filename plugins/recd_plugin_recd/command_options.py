"""Click options that several commands of this plugin share."""

from __future__ import annotations

import click

from recd_plugins.api import cli_options

session = click.option(
    "--session",
    help="Column of the session id.  [default: session_id in Parquet tables]",
)
label = click.option("--label", help="Label column, if an imported table has several candidates.")
timestamp = click.option(
    "--timestamp",
    help="Column of the time.  [default: ts in Parquet tables]",
)
nulls = click.option(
    "--nulls",
    type=click.Choice(["error", "empty"]),
    default="error",
    show_default=True,
    help="Whether null lists are an error or empty lists.",
)
row_group_rows = click.option(
    "--row-group-rows",
    type=cli_options.AT_LEAST_1,
    default=8192,
    show_default=True,
    help="Maximum rows per row group. Row groups end between sessions.",
)
force = click.option("--force", is_flag=True, help="Replace DST if it is an existing table.")
figures = click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT,
    help="Write statistics of the result as JSON to this file.",
)

"""The command ``recd histories build``, which writes an event log as a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from recd_plugin_tables.kinds import Role, Unit
from recd_plugins.api import DataError, cli_options, progress_bars

if TYPE_CHECKING:
    from recd_plugin_tables.histories.build import EventColumns
    from recd_plugin_tables.sources import Source


@click.group()
def histories() -> None:
    """Write event logs as stores, for history features of training rows."""


@histories.command()
@click.argument("events", metavar="EVENTS")
@click.argument("output", type=cli_options.OUTPUT, metavar="OUT")
@click.option("--user", metavar="COLUMN", help="Column of the user.")
@click.option("--time", metavar="COLUMN", help="Column of the time.")
@click.option("--unit", type=click.Choice(get_args(Unit)), help="Unit of a numeric time.")
@click.option("--items", metavar="COLUMN[,COLUMN]", help="Columns of the ids to store.")
@click.option("--format", "format_name", metavar="NAME", help="Format of EVENTS.")
@click.option(
    "--header", metavar="NAMES", help="Column names of a text file without a header line: a,b,c."
)
@click.option("--separator", metavar="CHARACTER", help="Column separator of text files.")
@click.option("--force", is_flag=True, help="Replace OUT if it is a store of events.")
def build(
    events: str,
    output: Path,
    user: str | None,
    time: str | None,
    unit: Unit | None,
    items: str | None,
    format_name: str | None,
    header: str | None,
    separator: str | None,
    force: bool,
) -> None:
    """Write each user's events once, sorted by user and time, to the Parquet file OUT.

    EVENTS is a table in any format that recd init reads. Columns without an option are guessed from
    names, types and values. The dataset tables.table reads OUT through its option histories.

    \b
    recd histories build clicks.parquet clicks.events.parquet --items item,category
    """
    from recd_plugin_tables.histories.build import build_store
    from recd_plugin_tables.histories.store import check_replaceable
    from recd_plugin_tables.sources import SourceOptions, open_source

    given = {"format": format_name, "header": header and _names(header), "separator": separator}
    options = SourceOptions.model_validate({name: each for name, each in given.items() if each})
    source = open_source(events, options)
    columns = event_columns(source, user, time, _names(items or ""), unit)
    cli_options.check_output(output, force)
    check_replaceable(output)
    with progress_bars.row_progress(f"sorting {source.location}", source.num_rows) as advance:
        stored, left_out = build_store(source, output, columns, advance)
    click.echo(
        f"{output}: {stored:,} events, {output.stat().st_size / 1e6:.1f} MB; user "
        f"{columns.user!r}, time {columns.time!r}{f' ({columns.unit})' if columns.unit else ''}, "
        f"items {', '.join(map(repr, columns.items))}"
    )
    if left_out:
        click.echo(f"  {left_out:,} events were left out, because a value is missing.")
    click.echo(
        "To read histories from it, add to dataset.options of tables.table:\n"
        f"  histories: {{clicks: {{store: {output}, last: 50}}}}"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def event_columns(
    source: Source,
    user: str | None = None,
    time: str | None = None,
    items: tuple[str, ...] = (),
    unit: Unit | None = None,
) -> EventColumns:
    """Return the columns of an event log. Guess the columns that are not given.

    Raises:
        DataError: a column does not exist or cannot be guessed.
    """
    from recd_plugin_tables.histories.build import EventColumns
    from recd_plugin_tables.start.guess import Wanted, guess
    from recd_plugin_tables.start.names import USER, named_so
    from recd_plugin_tables.start.survey import survey

    found = survey(source, ())
    user = user or named_so(list(found.seen), USER, "session")
    roles: dict[str, tuple[Role, ...]] = dict.fromkeys(items, ("id",))
    guesses = guess(found, Wanted(session=user, time=time, implicit=True, roles=roles))
    chosen = {"user": guesses.the("session"), "time": guesses.the("time")}
    if not items and guesses.item is not None:
        items = (guesses.item.name,)
    for option, column in {**chosen, "items": items or None}.items():
        if column is None:
            raise DataError(
                f"{source.location}: no column was recognized as the {option} of an event. Name it "
                f"with --{option} COLUMN."
            )
    of_user, of_time = (each.seen for each in chosen.values() if each is not None)
    is_number = of_time.largest is not None
    return EventColumns(
        of_user.leaf.name, of_time.leaf.name, items, (unit or of_time.unit) if is_number else None
    )

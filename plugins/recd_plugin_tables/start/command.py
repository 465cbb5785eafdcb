"""``recd init TABLE FILE``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import RecdError, cli_options, file_utils

if TYPE_CHECKING:
    from recd_plugin_tables.kinds import Role
    from recd_plugin_tables.start.guesses import Guesses


@click.command("TABLE")
@click.argument("table", metavar="TABLE")
@click.argument("file", type=cli_options.OUTPUT_PATH)
@click.option(
    "--label",
    metavar="COLUMN",
    help="Column to predict, or several: click,like,watch_time. Numbers become regressions. "
    "NAME=COLUMN>=VALUE is a label that is 1 from VALUE, such as liked=rating>=4.",
)
@click.option("--session", metavar="COLUMN", help="Column that groups rows: a visit, or a user.")
@click.option("--time", metavar="COLUMN", help="Time column.")
@click.option("--request", metavar="COLUMN", help="Column that groups the rows shown together.")
@click.option(
    "--implicit",
    is_flag=True,
    help="Every row is a positive interaction; there is no label column.",
)
@click.option(
    "--positive-from",
    type=float,
    metavar="VALUE",
    help="Labels of at least this are 1, for example 4 of 5 stars.  [default: "
    "75% of the range, or 1 for counts]",
)
@click.option(
    "--unused", multiple=True, metavar="COLUMN", help="Exclude a column. Can be repeated."
)
@click.option(
    "--as",
    "roles",
    multiple=True,
    metavar="COLUMN=ROLE",
    help="Set the role of a column that is guessed wrong: id, ids, number, numbers, key or unused. "
    "key,id (or another feature role) is a feature and a key. Can be repeated.",
)
@click.option(
    "--explode",
    multiple=True,
    metavar="COLUMN",
    help="List column to explode: each element becomes a row. Can be repeated.  [default: lists "
    "parallel to a list of labels]",
)
@click.option(
    "--test",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=0.1,
    show_default=True,
    help="Fraction of rows in the test split: the latest rows, or whole sessions.",
)
@click.option(
    "--validation",
    type=click.FloatRange(min=0, max=1, max_open=True),
    help="Fraction of rows in the validation split, which selects the best checkpoint. Chosen like "
    "the test split.  [default: 0.1, or 0 for tables with fewer than 2,000 rows]",
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="Format of the table, if its name does not show it.",
)
@click.option(
    "--header",
    metavar="NAMES",
    help="Column names of a text file without a header line: user,item,rating.",
)
@click.option(
    "--separator", metavar="CHARACTER", help="Column separator of text files, such as ';'."
)
@click.option(
    "--decimal",
    type=click.Choice([".", ","]),
    help="Decimal separator of text files.  [default: .]",
)
@click.option("--query", help="One SELECT on a DuckDB file. Its result is the table.")
@click.option("--of", "table_name", metavar="NAME", help="Table in a DuckDB file or a catalog.")
@click.option(
    "--histories",
    metavar="EVENTS",
    help="Event log, or file of recd histories build, from which to read each user's history.",
)
@click.option(
    "--dynamic",
    is_flag=True,
    help="Use dynamic tables instead of vocabularies for columns with more than 256 distinct ids.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(
    table: str,
    file: Path,
    label: str | None,
    session: str | None,
    time: str | None,
    request: str | None,
    implicit: bool,
    positive_from: float | None,
    unused: tuple[str, ...],
    roles: tuple[str, ...],
    explode: tuple[str, ...],
    test: float,
    validation: float | None,
    format_name: str | None,
    header: str | None,
    separator: str | None,
    decimal: str | None,
    query: str | None,
    table_name: str | None,
    histories: str | None,
    dynamic: bool,
    force: bool | None,
) -> None:
    """Write a registry file for your own table.

    TABLE is a file or folder of Parquet, CSV, TSV, JSON lines, Arrow or Feather; an Iceberg, Delta
    or Lance table; a saved Hugging Face dataset; a DuckDB file; or a URL. The role of each column
    is guessed from its name, its type and the first 200,000 rows. Comments in FILE explain the
    guess. To correct a wrong guess, run the command again with --as.

    \b
    recd init clicks.parquet my.yaml
    recd init clicks.parquet my.yaml --as device_age=number --force
    """
    if force is not None:  # from `recd init`
        cli_options.check_output(file, force, begins=rb"(?ms).*^dataset *:")
    if file.suffix not in (".yaml", ".yml"):
        raise click.UsageError(
            f"{file}: the registry FILE needs the suffix .yaml. Use a path such as my.yaml."
        )
    for option, given in (("--histories", histories is not None), ("--dynamic", dynamic)):
        if given and implicit:
            raise click.UsageError(
                f"{option} needs a label, so it cannot be combined with --implicit."
            )
    from pydantic import ValidationError

    from recd_plugin_tables.sources import SourceOptions, open_source
    from recd_plugin_tables.start.guess import Wanted, guess, lists_to_explode
    from recd_plugin_tables.start.labels import wanted_labels
    from recd_plugin_tables.start.registry_text import path_line, registry_text
    from recd_plugin_tables.start.survey import survey

    if force is None and not (label or session or time) and file.exists():  # of `recd run`
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
        if path_line(table) in text:
            click.echo(f"using {file}, the registry file of an earlier run", err=True)
            return
    names = None if header is None else tuple(name.strip() for name in header.split(","))
    reading = {
        "format": format_name,
        "separator": separator,
        "decimal": decimal,
        "header": names,
        "query": query,
        "table": table_name,
    }
    how = {name: value for name, value in reading.items() if value is not None}
    try:
        source = open_source(table, options=SourceOptions.model_validate(how))
    except ValidationError as error:
        problems = "; ".join(f"--{each['loc'][0]}: {each['msg']}" for each in error.errors())
        raise click.UsageError(problems) from error
    found = survey(source, explode or None)
    labels = wanted_labels(label, [seen.leaf.name for seen in found.seen])
    label = labels[0].column if labels else label
    start = labels[0].positive_from if labels else positive_from
    wanted = Wanted(
        label, session, time, request, implicit, unused, start, _as_roles(roles), labels
    )
    if not explode and (lists := lists_to_explode(found, label)) != found.explode:
        found = survey(source, lists)
    guesses = guess(found, wanted)
    history = None
    if histories is not None:
        from recd_plugin_tables.start.histories import stored_history

        history = stored_history(histories, guesses, file)
    text = registry_text(
        guesses,
        location=table,
        file=file,
        source=how,
        test=test,
        validation=validation,
        history=history,
        dynamic=dynamic,
    )
    if force is None:
        _check_same(file, text, table)
    file_utils.write_text(file, text)
    _say(guesses, file, positive_said=positive_from is not None)
    if dynamic and "use: dynamic.table" not in text:
        click.echo("No table is dynamic, because no column has more than 256 distinct ids.")
    if histories is None and force is not None:
        from recd_plugin_tables.start.histories import event_log_beside

        if (log := event_log_beside(table, guesses)) is not None:
            click.echo(
                f"{log} looks like an event log of the same users. To read their histories from "
                f"it, repeat this command with --histories {shlex.quote(str(log))} --force"
            )


def _as_roles(given: Sequence[str]) -> dict[str, tuple[Role, ...]]:
    """Parse the values of ``--as``. Return a dict from column to roles."""
    from recd_plugin_tables.kinds import FEATURES

    allowed: tuple[Role, ...] = (*FEATURES, "key", "unused")
    found: dict[str, tuple[Role, ...]] = {}
    for each in given:
        column, _, text = each.rpartition("=")
        wanted = text.split(",")
        roles = tuple(role for role in ("key", *FEATURES, "unused") if role in wanted)
        both = len(roles) == 2 and roles[0] == "key" and roles[1] in FEATURES
        if not column or len(roles) != len(wanted) or not (both or len(roles) == 1):
            raise click.UsageError(
                f"--as {each!r} is not COLUMN=ROLE. Use one of these roles: {', '.join(allowed)}."
            )
        found[column] = roles
    return found


def _check_same(file: Path, text: str, table: str) -> None:
    """Raise an error if the existing file differs from ``text``."""
    if file.exists() and file.read_bytes() != text.encode("utf-8", errors="surrogateescape"):
        name = shlex.quote(str(file))
        raise RecdError(
            f"{file}: the file exists and differs from the registry that would be written for "
            f"{table}. Run recd run {name} to use the file, or rm {name} to remove it first. For "
            f"another file, run recd init {shlex.quote(table)} my.yaml."
        )


def _say(guesses: Guesses, file: Path, *, positive_said: bool) -> None:
    from recd_plugin_tables.start.guesses import sequence, towers

    columns = guesses.columns
    width = max(len(each.name) for each in columns)
    roles = max(len(", ".join(each.roles)) for each in columns)
    for each in columns:
        click.echo(f"{each.name:{width}}  {', '.join(each.roles):{roles}}  {each.why}")
    for each in columns:
        if each.suspicious:
            click.echo(
                f"Column {each.name!r} may leak the label ({each.suspicious}). Set its role to "
                "'unused' if its value is known only after the label."
            )
    if guesses.survey.explode:
        click.echo(
            f"Each list element of {', '.join(map(repr, guesses.survey.explode))} becomes a row."
        )
    if guesses.the("session") is None and not guesses.implicit and guesses.features("ids"):
        click.echo(
            "No session column was found. Only deduplication (recd.ikjt) needs one: name the "
            "column of users or visits with --session COLUMN."
        )
    for given in guesses.labels:
        name, kind = given["name"], given.get("type", "binary")
        click.echo(f"Label {name!r} of column {given.get('column', name)!r}: {kind}.")
    label = None if guesses.labels else guesses.the("label")
    if label is not None and " becomes 1" in label.why:
        swap = f" To swap them, change positive in {file}." if "positive" in label.options else ""
        click.echo(f"Label {label.name!r}: {label.why.rpartition('; ')[2]}.{swap}")
    elif label is not None and not positive_said and "positive_from" in label.options:
        click.echo(
            f"Label {label.name!r}: values of at least {label.options['positive_from']:g} become "
            "1, lower values 0. Change this threshold with --positive-from."
        )
    items = sequence(guesses)
    ranked = items or towers(guesses)
    if items:
        click.echo(f"Every row is a positive. Feature {items.history!r} lists the earlier items.")
    elif guesses.implicit:
        item = guesses.item
        drawn = (
            f"Negatives use other values of {item.name!r}." if item else "There are no negatives."
        )
        click.echo(f"Every row is a positive. {drawn}")
    name = shlex.quote(str(file))
    click.echo(
        f"To correct a wrong guess, repeat this command with --as COLUMN=ROLE --force. "
        f"Then run: recd run {name}"
    )
    if ranked:
        click.echo(f"To measure ranking, run: recd rank {name}{ranked.rank_options}")
    elif guesses.implicit:
        why = (
            "no column identifies users or sessions. Set one with --session COLUMN."
            if guesses.item
            else "no column is an id, so there is no item to rank."
        )
        click.echo(f"recd rank does not support this model: {why}")

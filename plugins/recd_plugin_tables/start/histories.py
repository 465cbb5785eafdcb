"""Histories from an event log, for ``recd init --histories EVENTS``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from recd_plugin_tables.histories.build import build_store
from recd_plugin_tables.histories.command import event_columns
from recd_plugin_tables.histories.store import EventStore, check_replaceable
from recd_plugin_tables.kinds import sort_of
from recd_plugin_tables.sources import open_source
from recd_plugin_tables.start.guesses import Guesses, name_of_history
from recd_plugin_tables.start.names import USER, named_so, time_column
from recd_plugin_tables.start.survey import survey
from recd_plugins.api import DataError, progress_bars

# Maximum number of files beside a table to inspect.
_MOST_FILES = 50
_SUFFIXES = {".parquet", ".csv", ".tsv", ".jsonl", ".arrow", ".feather"}


@dataclass(frozen=True)
class StoredHistory:
    """A history feature. ``shares`` is the item column if it has ids of the same type."""

    name: str
    options: dict[str, Any]
    distinct: int
    shares: str | None


def stored_history(events: str, guesses: Guesses, beside: Path) -> StoredHistory:
    """Return the history of an event log. Write the store beside the registry file if needed.

    Args:
        events: path or URL of the log, or path of a store.
        guesses: guessed roles of the table's columns.
        beside: path of the registry file.
    """
    where, user, time = guesses.survey.location, _user(guesses), guesses.the("time")
    if user is None or time is None:
        missing, option = ("user", "--session") if user is None else ("time", "--time")
        raise DataError(
            f"{where}: --histories needs the {missing} of each row, but no column was recognized "
            f"as the {missing}. Name it with {option} COLUMN."
        )
    path = Path(events)
    try:
        note = EventStore(path).note
    except DataError:
        path = beside.with_name(f"{Path(events).name.partition('.')[0]}.events.parquet")
        check_replaceable(path)
        log = open_source(events)
        columns = event_columns(log)
        with progress_bars.row_progress(f"sorting {events}", log.num_rows) as advance:
            build_store(log, path, columns, advance)
        note = EventStore(path).note
        click.echo(
            f"{path}: the events of {events}, by user {columns.user!r} and time {columns.time!r}, "
            f"items {columns.items[0]!r}"
        )
    item, stored = guesses.item, note.items[0]
    same = item is not None and sort_of(item.seen.leaf.type) == stored.kind
    return StoredHistory(
        name=name_of_history(guesses),
        options={"store": str(path), "user": user, "item": stored.name},
        distinct=EventStore(path).num_distinct(stored.name),
        shares=item.name if item is not None and same else None,
    )


def event_log_beside(table: str, guesses: Guesses) -> Path | None:
    """Return a file beside the table that looks like its event log, or None.

    A log has the user and item columns of the table, a time and no label. A file with all features
    of the table is not a log, but a table to score.
    """
    user, item, label = _user(guesses), guesses.item, guesses.the("label")
    if user is None or item is None or label is None or guesses.the("time") is None:
        return None
    needed = {each.name for each in guesses.columns if not {"label", "unused"} & {*each.roles}}
    file = Path(table)
    beside = sorted(file.parent.iterdir()) if file.is_file() else []
    files = [each for each in beside if each.suffix in _SUFFIXES and each != file]
    for path in files[:_MOST_FILES]:
        with suppress(DataError):
            source = open_source(path)
            names = {*source.schema.names}
            is_to_score = needed <= names
            if {user, item.name} <= names and label.name not in names and not is_to_score:
                found = survey(source, ())
                if time_column(found, list(found.seen)) is not None:
                    return path
    return None


def _user(guesses: Guesses) -> str | None:
    """Return the column named like a user, or else the session or request column."""
    usable = [each for each in guesses.columns if {"id", "session", "request"} & {*each.roles}]
    named = named_so([each.seen for each in usable], USER, "session")
    group = guesses.the("session") or guesses.the("request")
    return named or (None if group is None else group.name)

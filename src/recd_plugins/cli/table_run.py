"""A table in place of the registry file of ``recd run``."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.cli.init import TABLE, Starts
from recd_plugins.cli.options import contributed, tell_broken
from recd_plugins.errors import RecdError

#: Where registries of tables are kept.
_FOLDER = Path(".recd")
_REGISTRY = (".yaml", ".yml")


def registry_of(ctx: click.Context, given: Path, columns: dict[str, str | None]) -> Path:
    """The registry file of a run: ``given``, or what ``recd init`` writes for the table that it is.

    Args:
        ctx: of the command.
        given: what stands after it.
        columns: options about the columns of a table, None where they are not given.

    Raises:
        RecdError: the table is not as it should be, nothing installed takes one, or a file of this
            name was edited or is of another table.
    """
    named = {name: column for name, column in columns.items() if column is not None}
    is_registry = given.suffix.lower() in _REGISTRY or not (named or _is_table(given))
    if is_registry:
        if named:
            raise click.UsageError(
                f"--{next(iter(named))} is about a table, and {given} is a registry file, which "
                "says so itself"
            )
        return given
    starts, manager = contributed(ctx, "register_starts", Starts)
    start = starts.commands.get(TABLE)
    if start is None:
        tell_broken(manager)
        raise RecdError(f"{given}: nothing installed makes a registry of a table")
    # Of `.`, too.
    file = _FOLDER / f"{given.resolve().name.partition('.')[0] or 'table'}.yaml"
    # None: a file that is there has to be what is written.
    ctx.invoke(start, table=str(given), file=file, force=None, **named)
    return file


def _is_table(path: Path) -> bool:
    from recd_plugins.registry.loader import TABLE_SUFFIXES

    return path.suffix.lower() in TABLE_SUFFIXES or path.is_dir()

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


def registry_of(ctx: click.Context, given: str, columns: dict[str, str | None]) -> Path:
    """The registry file of a run: ``given``, or what ``recd init`` writes for the table that it is.

    Args:
        ctx: of the command.
        given: what stands after it; a URL is that of a table.
        columns: options about the columns of a table, None where they are not given.

    Raises:
        RecdError: the table is not as it should be, nothing installed takes one, or a file of this
            name was edited or is of another table.
    """
    named = {name: column for name, column in columns.items() if column is not None}
    is_registry = given.lower().endswith(_REGISTRY) or not (named or _is_table(given))
    if is_registry:
        if named:
            raise click.UsageError(
                f"--{next(iter(named))} is about a table, and {given} is a registry file, which "
                "says so itself"
            )
        return Path(given)
    starts, manager = contributed(ctx, "register_starts", Starts)
    start = starts.commands.get(TABLE)
    if start is None:
        tell_broken(manager)
        raise RecdError(f"{given}: nothing installed makes a registry of a table")
    # Of `.`, too.
    file = _FOLDER / f"{Path(given).resolve().name.partition('.')[0] or 'table'}.yaml"
    # None: a file that is there has to be what is written.
    ctx.invoke(start, table=given, file=file, force=None, **named)
    return file


def _is_table(given: str) -> bool:
    from recd_plugins.registry.document import names_table

    return names_table(given) or Path(given).is_dir()

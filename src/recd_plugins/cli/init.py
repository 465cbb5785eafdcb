"""``recd init``: write a first registry file (YAML) from a template that a plugin provides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from recd_plugins.cli.options import manager_of, tell_broken
from recd_plugins.runtime.errors import RecdError

#: Name of the command that handles paths and URLs of data.
TABLE = "TABLE"


class _TableContext(click.Context):
    @property
    def command_path(self) -> str:
        return super().command_path.rstrip()  # the table command is called without its name


def write_registry(ctx: click.Context, table: str, file: Path, **options: Any) -> None:
    """Write the registry file of a table, as ``recd init TABLE FILE`` does with ``options``.

    Raises RecdError if the table cannot be used, or no plugin accepts tables.
    """
    start = _starts(ctx).get(TABLE)
    if start is None:
        tell_broken(manager_of(ctx))
        raise RecdError(
            f"{table}: no installed plugin can read this table. Pass a registry file instead."
        )
    ctx.invoke(start, table=table, file=file, **options)


def _starts(ctx: click.Context) -> dict[str, click.Command]:
    """Return the subcommands of ``recd init``: ``TABLE`` for data files, others for models."""
    return {str(command.name): command for command in manager_of(ctx).items("register_starts")}


class _Init(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        starts = _starts(ctx)
        tell_broken(manager_of(ctx))
        return sorted(starts, key=lambda name: (name != TABLE, name))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _starts(ctx).get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        starts = _starts(ctx)
        if args[0] in starts and args[0] != TABLE:
            return super().resolve_command(ctx, args)
        table = starts.get(TABLE)
        if table is not None:
            table.context_class = _TableContext
        if table and args[0] == TABLE and not {"-h", "--help"}.isdisjoint(args):
            return "", table, args[1:]
        is_word = args[0].isidentifier() and not Path(args[0]).exists()
        if table is None or is_word:
            tell_broken(manager_of(ctx))
            names = ", ".join(sorted({*starts} - {TABLE}))
            kinds = "a file, a folder or a model" if table else "a model"
            ctx.fail(f"{args[0]!r} is not {kinds}. The models are {names}.")
        return "", table, args


@click.command(cls=_Init, subcommand_metavar="TABLE|NAME FILE [OPTIONS]")
def init() -> None:
    """Write a first registry file for your own table or for a named model.

    \b
    recd init clicks.parquet my.yaml
    recd init rm1 rm1.yaml
    """

"""The files that ``recd run`` writes besides ``--json``, of which packages have the options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from recd_plugins.cli.options import OUTPUT, manager_of, tell_broken
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import RunReport
from recd_plugins.manager import PluginManager
from recd_plugins.plugin_modules import qualified

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


class RunReports:
    """The files, beside options that ``recd run`` has itself.

    Attributes:
        params: their options.
    """

    def __init__(self, own: Iterable[click.Parameter]) -> None:
        self.params: list[click.Option] = []
        self._taken = {name for each in own for name in each.opts}
        self._by_name: dict[str, RunReport] = {}

    def add(self, cls: Any, where: str) -> None:
        """Add what a package registers.

        Args:
            cls: the report.
            where: that registers it, for messages.

        Raises:
            PluginError: it is none, or its option is there already.
        """
        what, flag = f"{where}: {qualified(cls)}", getattr(cls, "flag", "")
        if not _FLAG.fullmatch(flag) or not getattr(cls, "help", ""):
            raise PluginError(f"{what} needs a flag, as in --markdown, and help for it")
        if flag in self._taken:
            raise PluginError(
                f"{what} has {flag}, which recd run has already; rename it, or leave one package "
                "out (--without NAME)"
            )
        self._taken.add(flag)
        name = f"report_{len(self.params)}"
        self.params.append(click.Option([name, flag], type=OUTPUT, help=cls.help, metavar="FILE"))
        self._by_name[name] = cls()

    def asked_for(self, values: dict[str, Path | None]) -> Iterator[tuple[RunReport, Path]]:
        """The files that a command line names, and what writes them.

        Args:
            values: of ``params``, by name.
        """
        for name, path in values.items():
            if path is not None:
                yield self._by_name[name], path


class RunCommand(click.Command):
    """A command with the options of ``RunReports``: looked for where one is unknown to it."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, help_option = super().get_params(ctx)
        found: RunReports | None = ctx.meta.get(__name__)
        return [*own, *(found.params if found else ()), help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption:
            manager = self._look_for_reports(ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            tell_broken(manager)
            if setting := _setting_meant(error.option_name):
                raise click.UsageError(
                    f"No such option '{error.option_name}'. It is a value of the file: write "
                    f"{setting}=VALUE after REGISTRY",
                    ctx,
                ) from error
            raise

    def get_help(self, ctx: click.Context) -> str:
        tell_broken(self._look_for_reports(ctx))
        return super().get_help(ctx)

    def _look_for_reports(self, ctx: click.Context) -> PluginManager:
        manager, found = manager_of(ctx), RunReports(self.params)
        manager.hand("register_reports", found.add)
        ctx.meta[__name__] = found
        return manager


def reports_of(ctx: click.Context, values: dict[str, Path | None]) -> list[tuple[RunReport, Path]]:
    """The files that the command line of ``ctx`` names, by what ``RunCommand`` gave for them."""
    found: RunReports | None = ctx.meta.get(__name__)
    return [] if found is None else [*found.asked_for(values)]


def _setting_meant(flag: str) -> str:
    """The key of the section ``training`` that is called as an option; nothing where none is."""
    from recd_plugins.registry import TrainingSpec

    name = flag.removeprefix("--").replace("-", "_")
    return f"training.{name}" if name in TrainingSpec.model_fields else ""

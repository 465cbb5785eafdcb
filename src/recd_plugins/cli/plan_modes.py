"""Modes of ``recd plan``: their flags and options, and which of them a command line chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from recd_plugins.errors import PluginError
from recd_plugins.planning.plan_mode import PlanMode
from recd_plugins.plugin_modules import qualified

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


class PlanModes:
    """The modes of ``recd plan``, beside options that it has itself.

    Attributes:
        params: flags and options of the modes, as click has them.
    """

    def __init__(self, own: Iterable[click.Parameter]) -> None:
        self.params: list[click.Option] = []
        self._modes: list[tuple[PlanMode, list[click.Option]]] = []
        # Of names that are taken: by a mode, or by None, which is recd plan itself.
        self._owners: dict[str, type[PlanMode] | None] = {
            name: None for each in own for name in _names(each)
        }
        # Messages about names that two packages have.
        self._clashes: dict[str, str] = {}

    def add(self, cls: Any, where: str) -> None:
        """Add what a package registers.

        Args:
            cls: the mode.
            where: that registers it, for messages.

        Raises:
            PluginError: it is no usable mode, or has a flag or an option that is there already.
        """
        what = f"{where}: {qualified(cls)}"
        if not _FLAG.fullmatch(getattr(cls, "flag", "")) or not getattr(cls, "help", ""):
            raise PluginError(f"{what} needs a flag, as in --replicas, and help for it")
        if cls.calibrates is not None and cls.calibrate is PlanMode.calibrate:
            raise PluginError(f"{what} has calibrates, and no method calibrate")
        mode: PlanMode = cls()
        options = [_of_mode(each, cls.flag, what) for each in mode.options()]
        params = [click.Option([cls.flag], is_flag=True, help=cls.help), *options]
        for name, option in {name: each for each in params for name in _names(each)}.items():
            owner = self._owners.get(name, cls)
            if owner is not cls:
                of = qualified(owner) if owner else "recd plan itself"
                clash = f"{what} has {option.opts[0]}, which is that of {of}; rename it"
                if owner:
                    clash += ", or leave one package out (--without NAME)"
                    self._clashes.setdefault(name, clash)
                raise PluginError(clash)
        self._owners |= {name: cls for each in params for name in _names(each)}
        self._modes.append((mode, options))
        self.params += params

    def chosen(self, ctx: click.Context) -> tuple[PlanMode | None, dict[str, Any]]:
        """The mode whose flag was given, if one was, and the values of its options.

        Raises:
            click.UsageError: there are two flags, or options of a mode without its flag.
            PluginError: two packages have an option that was given.
        """
        given = {name for each in self.params if _given(ctx, each) for name in _names(each)}
        for name in self._clashes.keys() & given:
            raise PluginError(self._clashes[name])
        flags = [mode.flag for mode, _ in self._modes if mode.flag in given]
        if len(flags) > 1:
            raise click.UsageError(
                f"{flags[0]} and {flags[1]} are two plans: make one after the other"
            )
        chosen, values = None, {}
        for mode, options in self._modes:
            if mode.flag in flags:
                chosen = mode
                values = {str(each.name): ctx.params[str(each.name)] for each in options}
            elif alone := [each.opts[0] for each in options if given & {*each.opts}]:
                are = "are" if len(alone) > 1 else "is"
                raise click.UsageError(f"{' and '.join(alone)} {are} for {mode.flag}")
        return chosen, values


def _of_mode(option: click.Option, flag: str, what: str) -> click.Option:
    if option.required:
        raise PluginError(f"{what} requires {option.opts[0]}, also without {flag}; check() can ask")
    option.help = f"With {flag}: {option.help or option.opts[0]}"
    return option


def _given(ctx: click.Context, param: click.Parameter) -> bool:
    source = ctx.get_parameter_source(str(param.name))
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def _names(param: click.Parameter) -> list[str]:
    """What no two parameters of a command may share."""
    return [str(param.name), *param.opts, *param.secondary_opts]

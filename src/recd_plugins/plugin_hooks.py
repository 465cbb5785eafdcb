"""The hooks of one module: found, called, and their answers checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any

import pluggy

from recd_plugins import hookspecs
from recd_plugins.errors import PluginError
from recd_plugins.plugin_call import PLUGIN_FAILURES
from recd_plugins.plugin_modules import GROUP, without_folder_prefix


def hooks_of(module: ModuleType, origin: str) -> pluggy.PluginManager:
    """The hooks that a module implements, which are pluggy's own manager of it.

    Raises:
        PluginError: it implements none, or one that there is not.
    """
    hooks = pluggy.PluginManager(GROUP)
    hooks.add_hookspecs(hookspecs)
    if os.environ.get("RECD_TRACE_PLUGINS") == "1":
        hooks.trace.root.setwriter(sys.stderr.write)
        hooks.enable_tracing()
    try:
        hooks.register(module)
        hooks.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"{origin}: {without_folder_prefix(str(error))}. docs/plugins/README.md lists the hooks"
        ) from error
    if not hooks.get_hookcallers(module):
        raise PluginError(
            f"{origin} implements no hook; decorate its functions with recd_plugins.api.hookimpl"
        )
    return hooks


def call_hook(
    hooks: pluggy.PluginManager, hook: str, origin: str, *, answers: bool = True, **arguments: Any
) -> list[Any]:
    """What a hook of a module returned, once for each implementation.

    Args:
        hooks: of the module.
        hook: its name.
        origin: of the module, for messages.
        answers: whether it is to return something.
        **arguments: that it is called with.

    Raises:
        PluginError: it failed, or forgot to return; says where it comes from.
    """
    caller = getattr(hooks.hook, hook)
    try:
        with redirect_stdout(sys.stderr):  # a command's own output may be read by a program
            returned = list(caller(**arguments))
    except PluginError as error:
        raise PluginError(f"{origin}: {hook}: {error}") from error
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{origin}: {hook} failed: {type(error).__name__}: {error}") from error
    if answers and len(returned) < len(caller.get_hookimpls()):  # pluggy leaves out None
        raise PluginError(f"{origin}: {hook} returned None; return a list, which may be empty")
    return returned


def listed(classes: Any, where: str, what: str) -> list[Any]:
    """What a hook returned, a list of ``what``; a generator runs here.

    Raises:
        PluginError: it is no list, or the generator failed.
    """
    if isinstance(classes, type | str) or not isinstance(classes, Iterable):
        returned = "a class" if isinstance(classes, type) else repr(classes)
        raise PluginError(f"{where} returned {returned}; return a list of {what}")
    try:
        with redirect_stdout(sys.stderr):
            return list(classes)
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{where} failed: {type(error).__name__}: {error}") from error

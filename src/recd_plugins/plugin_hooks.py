"""The hooks of one module: found, called, and their answers checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
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
            f"{origin}: {without_folder_prefix(str(error))}. The hooks are those of "
            f"recd_plugins.hookspecs."
        ) from error
    if not hooks.get_hookcallers(module):
        raise PluginError(
            f"{origin} implements no hook; decorate its functions with "
            f"recd_plugins.hookspecs.hookimpl"
        )
    return hooks


def call_hook(hooks: pluggy.PluginManager, hook: str, origin: str, **arguments: Any) -> list[Any]:
    """What a hook of a module returned, once for each implementation.

    Raises:
        PluginError: it failed; says where it comes from.
    """
    try:
        return list(getattr(hooks.hook, hook)(**arguments))
    except PluginError as error:
        raise PluginError(f"{origin}: {hook}: {error}") from error
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{origin}: {hook} failed: {type(error).__name__}: {error}") from error


def listed(classes: Any, where: str, what: str) -> list[Any]:
    """What a hook returned, a list of ``what``; a generator runs here.

    Raises:
        PluginError: it is no list, or the generator failed.
    """
    if isinstance(classes, type | str) or not isinstance(classes, Iterable):
        returned = "a class" if isinstance(classes, type) else repr(classes)
        raise PluginError(f"{where} returned {returned}; return a list of {what}")
    try:
        return list(classes)
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{where} failed: {type(error).__name__}: {error}") from error

"""Checks of what declares plugins, made when it is loaded."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

from recd_plugins import __version__
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Plugin, PluginOptions
from recd_plugins.plugin_modules import qualified

#: Of ``recd_plugins.api``: goes up by one where a plugin that is newer needs what older ones lack.
API_VERSION = 1

_NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


def check_api(module: ModuleType, origin: str) -> None:
    """Refuse a module whose ``REQUIRES_API`` is more than ``API_VERSION``.

    Raises:
        PluginError: says what to upgrade.
    """
    needed = getattr(module, "REQUIRES_API", API_VERSION)
    if type(needed) is not int or needed < 1:
        raise PluginError(f"{origin}: REQUIRES_API is {needed!r}; it is a version, as in 1")
    if needed > API_VERSION:
        raise PluginError(
            f"{origin} needs version {needed} of recd_plugins.api, and recd-plugins {__version__} "
            f"has {API_VERSION}: upgrade it (pip install --upgrade recd-plugins)"
        )


def check_class(cls: Any, interface: type[Plugin], where: str) -> None:
    """Refuse what is no usable plugin class of the kind that has this interface.

    Raises:
        PluginError: says what is wrong, after ``where``.
    """
    if not (isinstance(cls, type) and issubclass(cls, interface)):
        raise PluginError(
            f"{where} returned {qualified(cls) if isinstance(cls, type) else repr(cls)}, "
            f"which is no subclass of {qualified(interface)}"
        )
    what = f"{where}: {qualified(cls)}"
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        has = "no name" if name is None else f"name {name!r}"
        raise PluginError(
            f"{what} has {has}; it must be package.part in lower case, as in 'acme.hash'"
        )
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise PluginError(f"{what} does not implement {', '.join(missing)}")
    if not cls.summary():
        raise PluginError(f"{what} has no docstring; its first line is what `recd plugins` shows")
    if not (isinstance(cls.Options, type) and issubclass(cls.Options, PluginOptions)):
        raise PluginError(
            f"{what}: Options is no subclass of recd_plugins.interfaces.PluginOptions"
        )
    for method, declared in inspect.getmembers(interface, inspect.isfunction):
        own = getattr(cls, method)
        if not method.startswith("_") and own is not declared and not _takes(own, declared):
            raise PluginError(
                f"{what}.{method} takes {_parameters(own)}, and is called with "
                f"{_parameters(declared)}"
            )


def _takes(own: Any, declared: Any) -> bool:
    """Whether what may be passed to ``declared`` may be passed to ``own``."""
    if not callable(own):
        return False
    positional: list[None] = []
    named: dict[str, None] = {}
    for parameter in inspect.signature(declared).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = None
        else:
            positional.append(None)
    try:
        inspect.signature(own).bind(*positional, **named)
    except TypeError:
        return False
    return True


def _parameters(function: Any) -> str:
    if not callable(function):
        return repr(function)
    return ", ".join(
        str(p).partition(":")[0] for p in inspect.signature(function).parameters.values()
    )

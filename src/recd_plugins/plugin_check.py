"""Checks of what declares plugins, made when it is loaded."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from types import ModuleType
from typing import Any

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Callback, Dataset, Plugin, PluginOptions
from recd_plugins.plugin_call import PLUGIN_FAILURES
from recd_plugins.plugin_modules import qualified
from recd_plugins.versions import __version__
from recd_plugins.words import did_you_mean

API_VERSION = 5
"""The version of the API: goes up by one where plugins may need what older ones lack."""

_INTERFACES = "recd_plugins.interfaces."
# How methods begin that are called when something happens.
_EVENT = "on_"
# How alike names are of which one is the other misspelt, as difflib has it.
_MISSPELT = 0.8
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?")


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
    try:
        _check_class(cls, interface, where)
    except PluginError:
        raise
    except PLUGIN_FAILURES as error:  # of code of the class, as its summary
        what = qualified(cls) if isinstance(cls, type) else type(cls).__name__
        message = f"{where}: {what} cannot be checked: {type(error).__name__}: {error}"
        raise PluginError(message) from error


def _check_class(cls: Any, interface: type[Plugin], where: str) -> None:
    check_implements(cls, interface, where)
    if issubclass(cls, Callback) and not issubclass(interface, Callback):  # it is one besides
        check_implements(cls, Callback, where)
    what = f"{where}: {qualified(cls)}"
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        has = "no name" if name is None else f"name {name!r}"
        raise PluginError(
            f"{what} has {has}; it must be package.part in lower case, as in 'acme.hash'"
        )
    if not cls.summary():
        raise PluginError(f"{what} has no docstring; its first line is what `recd plugins` shows")
    if not (isinstance(cls.Options, type) and issubclass(cls.Options, PluginOptions)):
        raise PluginError(f"{what}: Options is no subclass of recd_plugins.api.PluginOptions")
    for sets in ("free_options", *(("row_options",) if issubclass(cls, Dataset) else ())):
        _check_options(cls, sets, what)


def _check_options(cls: type[Plugin], sets: str, what: str) -> None:
    """Refuse an attribute that names options and has what is none."""
    fields, named = cls.Options.model_fields, getattr(cls, sets)
    is_set = isinstance(named, (frozenset, set, tuple, list))
    if not (is_set and all(isinstance(option, str) for option in named)):
        raise PluginError(f"{what}.{sets} is {named!r:.80}; expected a set of options' names")
    if unknown := sorted({*named} - fields.keys()):
        raise PluginError(
            f"{what}.{sets} has {unknown[0]!r}, which is none of its options"
            f"{did_you_mean(unknown[0], fields)}"
        )


def check_implements(cls: Any, interface: type, where: str) -> None:
    """Refuse what is no subclass of an interface, or cannot be called as one.

    Raises:
        PluginError: says what is wrong, after ``where``.
    """
    if not (isinstance(cls, type) and issubclass(cls, interface)):
        raise PluginError(
            f"{where} returned {qualified(cls) if isinstance(cls, type) else repr(cls)}, "
            f"which is no subclass of {qualified(interface)}"
        )
    what = f"{where}: {qualified(cls)}"
    # Looked at one by one: without ABC an interface has no __abstractmethods__.
    of_class = _attributes(cls)
    missing = (name for name, of in of_class.items() if getattr(of, "__isabstractmethod__", False))
    if names := ", ".join(sorted(missing)):
        raise PluginError(f"{what} does not implement {names}")
    events = [name for name in _attributes(interface) if name.startswith(_EVENT)]
    for method, of in of_class.items():
        if events and method.startswith(_EVENT) and method not in events and inspect.isfunction(of):
            meant = did_you_mean(method, events) or f"; there are: {', '.join(events)}"
            raise PluginError(f"{what}.{method} is never called{meant}")
    # Of a kind there may be several, as that of choosers among those of shardings.
    own_interfaces = [each for each in cls.__mro__ if each.__module__.startswith(_INTERFACES)]
    nearest = next((each for each in own_interfaces if issubclass(each, interface)), interface)
    declares = _attributes(nearest)
    _check_names(cls, nearest, declares, what)
    for name, declared in sorted(declares.items()):
        own = of_class[name]
        if name.startswith("_") or own is declared:
            continue
        of_classes = isinstance(own, classmethod) and isinstance(declared, classmethod)
        if inspect.isfunction(declared) or of_classes:
            declared = getattr(declared, "__func__", declared)
            _check_method(cls, name, own, declared, f"{what}.{name}")
        else:
            _check_value(own, declared, f"{what}.{name}")


def _attributes(cls: type) -> dict[str, Any]:
    """What a class and those that it inherits from declare, as it stands there."""
    return {name: of for each in reversed(cls.__mro__) for name, of in vars(each).items()}


def _check_names(cls: type, interface: type, declares: dict[str, Any], what: str) -> None:
    """Refuse a name that is nearly one of the interface's: what it says would never be asked for.

    Any other name may be a helper's, and so may one that is like what the class overrides as well,
    or a name of what else it inherits from.
    """
    of_class = _attributes(cls)
    unset = [n for n, of in declares.items() if not n.startswith("_") and of_class[n] is of]
    others = {
        name for each in cls.__mro__ if not issubclass(each, interface) for name in vars(each)
    }
    for name in sorted(of_class.keys() - declares.keys() - others):
        # Closer than what did_you_mean suggests, as a plugin that works is not to be refused.
        close = difflib.get_close_matches(name, unset, n=1, cutoff=_MISSPELT)
        if close and not name.startswith("_"):
            raise PluginError(
                f"{what}.{name} is never asked for; did you mean {close[0]}? Names of helpers that "
                f"are so close begin with an underscore, as _{name}"
            )


def _check_method(cls: type, method: str, own: Any, declared: Any, what: str) -> None:
    """Refuse an override that cannot be called as the interface's method is."""
    called_with = _parameters(declared, bound=True)
    positional = [p for p in called_with if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: None for p in called_with if p.kind is p.KEYWORD_ONLY}
    try:
        taken = _parameters(getattr(cls, method), bound=inspect.isfunction(own))
        inspect.Signature(taken).bind(*positional, **named)
    except (TypeError, ValueError) as error:  # ValueError: it has no parameter at all
        words = ", ".join(p.name for p in called_with)
        message = f"{what} is called with ({words}), which it does not take: {error}"
        raise PluginError(message) from error


def _check_value(own: Any, declared: Any, what: str) -> None:
    """Refuse an override that is of another sort than the interface's, which all would be true of.

    A function is true whatever it returns, and so is the text "False".
    """
    for sort in (property, classmethod):
        if isinstance(declared, sort) and inspect.isfunction(own):
            raise PluginError(f"{what} is a method of instances; write @{sort.__name__} above it")
    getter = declared.fget if isinstance(declared, property) else None
    returned = None if getter is None else inspect.get_annotations(getter).get("return")
    says_bool = returned is bool or returned == "bool"
    is_computed = hasattr(own, "__get__") and not _is_called(own)
    if (says_bool or isinstance(declared, bool)) and not (is_computed or isinstance(own, bool)):
        raise PluginError(f"{what} is {own!r:.80}; expected True or False")
    if getter is not None and _is_called(own):
        raise PluginError(f"{what} is {own!r:.80}; expected a value, or one that @property makes")


def _is_called(own: Any) -> bool:
    """Whether what a class declares is to be called, as functions in whatever they are wrapped."""
    if isinstance(own, classmethod | staticmethod | functools.partialmethod):
        return True
    # Those of functools.cache, too; a class that stands in a class is a value.
    return callable(own) and hasattr(own, "__get__") and not isinstance(own, type)


def _parameters(function: Any, *, bound: bool) -> list[inspect.Parameter]:
    """Of a function as it is called on an instance, which is the first of a bound one's."""
    return list(inspect.signature(function).parameters.values())[bound:]

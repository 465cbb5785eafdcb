"""Finds plugins: in installed packages, loaded where their names are asked for, and in files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from recd_plugins import hookspecs
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import (
    Cache,
    Converter,
    Dataset,
    Ingestion,
    Plugin,
    Pooling,
    Preprocessing,
    Sharding,
)
from recd_plugins.plugin_call import PLUGIN_FAILURES
from recd_plugins.plugin_check import check_api, check_class
from recd_plugins.plugin_modules import (
    GROUP,
    Package,
    installed_packages,
    modules_in_folder,
    qualified,
    without_folder_prefix,
)

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

#: Interface and hook by kind, in the order in which data meets the kinds.
KINDS: dict[str, tuple[type[Plugin], str]] = {
    "dataset": (Dataset, "register_datasets"),
    "converter": (Converter, "register_converters"),
    "preprocessing": (Preprocessing, "register_preprocessing"),
    "ingestion": (Ingestion, "register_ingestions"),
    "pooling": (Pooling, "register_poolings"),
    "sharding": (Sharding, "register_shardings"),
    "cache": (Cache, "register_caches"),
}


@dataclass(frozen=True)
class Registered:
    """A plugin class and where it came from: ``"distribution version"`` or the path of a file."""

    cls: type[Plugin]
    origin: str


@dataclass(frozen=True)
class Broken:
    """An installed package whose plugins cannot be used, or a name that two have, and why.

    Attributes:
        name: of the package, or of the plugins.
        reason: a message that names what brought it.
    """

    name: str
    reason: str


class PluginManager:
    """Every plugin that is installed or lies in ``plugins_dir``.

    An installed package is imported when a name is asked for that starts with its own, or that no
    other has. One that is broken is listed in ``broken`` and stops only what needs it; a file of
    ``plugins_dir`` that is broken is an error, since whoever names the folder wants what is in it.

    With ``RECD_TRACE_PLUGINS=1`` hook calls are written to stderr; ``installed_packages`` tells
    what leaves packages out.

    Raises:
        PluginError: a file fails to import or is no plugin, or what is to be left out is unknown.
    """

    def __init__(self, plugins_dir: str | Path | None = None) -> None:
        self._packages = installed_packages()
        self._waiting = list(self._packages)
        self._owners = {package.name: package.origin for package in self._packages}
        self._broken: list[Broken] = []
        # One of pluggy's for each module: what a hook returns can be traced back to it.
        self._modules: dict[ModuleType, tuple[pluggy.PluginManager, str, Package | None]] = {}
        self._files: list[str] = []
        self._found: dict[str, dict[str, list[Registered]]] = {kind: {} for kind in KINDS}
        if plugins_dir is not None:
            for module, origin in modules_in_folder(Path(plugins_dir)):
                self._files.append(origin)
                self._add(module, origin, None)

    @property
    def origins(self) -> tuple[str, ...]:
        """Where plugins can come from, each place once: installed ones first, then files."""
        installed = [package.origin for package in self._packages]
        return tuple(dict.fromkeys([*installed, *self._files]))

    @property
    def broken(self) -> tuple[Broken, ...]:
        """What is installed and cannot be used; imports all of it."""
        self._load()
        clashes = (
            Broken(name, str(_clash(kind, name, found)))
            for kind, by_name in self._found.items()
            for name, found in by_name.items()
            if len(found) > 1
        )
        return (*self._broken, *clashes)

    @property
    def plugins(self) -> dict[str, dict[str, Registered]]:
        """Plugin classes by kind and name, without what is broken.

        Raises:
            PluginError: two plugins have one kind and name, and one of them is of a file.
        """
        self._load()
        for kind, by_name in self._found.items():
            for name, found in by_name.items():
                if len(found) > 1 and any(each.origin in self._files for each in found):
                    raise _clash(kind, name, found)
        return {
            kind: {name: found[0] for name, found in by_name.items() if len(found) == 1}
            for kind, by_name in self._found.items()
        }

    def find(self, kind: str, name: str) -> Registered | None:
        """The plugin of that kind and name, None where there is none.

        Raises:
            PluginError: the package that has such names is broken, or two plugins have the name.
        """
        prefix = name.partition(".")[0]
        # A name that is no package's own may be of several: all are looked at, in whatever order.
        self._load(prefix if prefix in self._owners else None)
        found = self._found[kind].get(name)
        if found is None:
            for broken in self._broken:
                if broken.name == prefix:
                    raise PluginError(broken.reason)
            return None
        if len(found) > 1:
            raise _clash(kind, name, found)
        return found[0]

    def register_commands(self, cli: click.Group) -> None:
        """Let every plugin add its commands to ``cli``.

        Raises:
            PluginError: one of a file failed; of an installed package it is in ``broken`` then.
        """
        for hooks, origin, package in self._installed_first():
            with self._tolerated(package):
                _call(hooks, "register_commands", origin, cli=cli)

    def register_topology_sections(self) -> dict[str, type[BaseModel]]:
        """What installed packages have in topology files, by name; the first of two has one."""
        self._load()
        sections: dict[str, type[BaseModel]] = {}
        for hooks, origin, package in self._modules.values():
            with self._tolerated(package):
                for of_module in _call(hooks, "register_topology_sections", origin):
                    sections = {**of_module, **sections}
        return sections

    def register_plans(self, add: Callable[[Any, str], None]) -> None:
        """Let ``add`` have every mode of ``recd plan``, and the words that name its package.

        Raises:
            PluginError: one of a file failed; of an installed package it is in ``broken`` then.
        """
        self._hand("register_plans", add)

    def register_benchmarks(self, add: Callable[[Any, str], None]) -> None:
        """Let ``add`` have the name of every module that is a benchmark, likewise.

        Raises:
            PluginError: one of a file failed; of an installed package it is in ``broken`` then.
        """
        self._hand("register_benchmarks", add)

    def _hand(self, hook: str, add: Callable[[Any, str], None]) -> None:
        for hooks, origin, package in self._installed_first():
            where = f"{origin}: {hook}"
            with self._tolerated(package):
                for returned in _call(hooks, hook, origin):
                    for each in _listed(returned, where):
                        try:
                            add(each, where)
                        except PluginError:
                            raise
                        except PLUGIN_FAILURES as error:
                            message = f"{where} failed: {type(error).__name__}: {error}"
                            raise PluginError(message) from error

    def _installed_first(self) -> list[tuple[pluggy.PluginManager, str, Package | None]]:
        """Every module: of what is there already, a file is told."""
        self._load()
        return sorted(self._modules.values(), key=lambda module: module[2] is None)

    def _load(self, name: str | None = None) -> None:
        """Import the installed packages of that name, or all, that were not imported yet."""
        now = [package for package in self._waiting if name in (None, package.name)]
        self._waiting = [package for package in self._waiting if package not in now]
        for package in now:
            with self._tolerated(package):
                self._add(package.load(), package.origin, package)

    @contextmanager
    def _tolerated(self, package: Package | None) -> Iterator[None]:
        try:
            yield
        except PluginError as error:
            if package is None:
                raise
            self._broken.append(Broken(package.name, str(error)))

    def _add(self, module: ModuleType, origin: str, package: Package | None) -> None:
        if module in self._modules:
            return
        check_api(module, origin)
        hooks = _hooks_of(module, origin)
        found = [
            (kind, cls) for kind in KINDS for cls in self._classes(kind, hooks, origin, package)
        ]
        self._modules[module] = hooks, origin, package
        for kind, cls in found:
            self._found[kind].setdefault(cls.name, []).append(Registered(cls, origin))

    def _classes(
        self, kind: str, hooks: pluggy.PluginManager, origin: str, package: Package | None
    ) -> Iterator[type[Plugin]]:
        """The plugin classes of a kind that a module registers."""
        interface, hook = KINDS[kind]
        where = f"{origin}: {hook}"
        for classes in _call(hooks, hook, origin):
            for cls in _listed(classes, where):
                check_class(cls, interface, where)
                prefix = cls.name.partition(".")[0]
                if package is not None and prefix != package.name and prefix in self._owners:
                    raise PluginError(
                        f"{where}: {qualified(cls)} is named {cls.name}, and names that start with "
                        f"{prefix}. are those of {self._owners[prefix]}; rename it, or leave "
                        f"{package.name} out (--without {package.name})"
                    )
                yield cls


def _hooks_of(module: ModuleType, origin: str) -> pluggy.PluginManager:
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


def _call(hooks: pluggy.PluginManager, hook: str, origin: str, **arguments: Any) -> list[Any]:
    try:
        return list(getattr(hooks.hook, hook)(**arguments))
    except PluginError as error:
        raise PluginError(f"{origin}: {hook}: {error}") from error
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{origin}: {hook} failed: {type(error).__name__}: {error}") from error


def _listed(classes: Any, where: str) -> list[Any]:
    """What a hook returned; a generator runs here."""
    if isinstance(classes, type | str) or not isinstance(classes, Iterable):
        what = "a class" if isinstance(classes, type) else repr(classes)
        of = "modules" if where.endswith("benchmarks") else "classes"
        raise PluginError(f"{where} returned {what}; return a list of {of}")
    try:
        return list(classes)
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{where} failed: {type(error).__name__}: {error}") from error


def _clash(kind: str, name: str, found: list[Registered]) -> PluginError:
    first, second = found[:2]
    return PluginError(
        f"two {kind} plugins are named {name}: {qualified(first.cls)} from {first.origin} and "
        f"{qualified(second.cls)} from {second.origin}; {_remedy(first.origin, second.origin)}"
    )


def _remedy(*origins: str) -> str:
    if files := [origin for origin in origins if origin.endswith(".py")]:
        return f"remove {files[-1]}, or rename its plugin"
    return "rename one, or leave one out (--without NAME)"

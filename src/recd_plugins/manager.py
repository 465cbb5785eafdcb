"""Finds plugins: packages under the entry-point group ``recd_plugins`` and a folder of files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from recd_plugins import hookspecs
from recd_plugins.errors import PluginError
from recd_plugins.files import real_path
from recd_plugins.interfaces import (
    Cache,
    Converter,
    Dataset,
    Ingestion,
    Plugin,
    PluginOptions,
    Pooling,
    Preprocessing,
    Sharding,
)
from recd_plugins.plugin_call import PLUGIN_FAILURES

if TYPE_CHECKING:
    import click

GROUP = "recd_plugins"
OWN_DISTRIBUTION = "recd-plugins"

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

_NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
# Of modules of files: the name is the manager's own, and messages name the file.
_PREFIX = "recd_plugins_dir_"
_FOLDER_MODULE = re.compile(rf"{_PREFIX}[0-9a-f]{{12}}_")


@dataclass(frozen=True)
class Registered:
    """A plugin class and where it came from: ``"distribution version"`` or the path of a file."""

    cls: type[Plugin]
    origin: str


class PluginManager:
    """Every plugin that is installed or lies in ``plugins_dir``.

    Two environment variables matter: with ``RECD_TRACE_PLUGINS=1`` hook calls are written to
    stderr, and with ``RECD_NO_THIRD_PARTY=1`` only the entry points of recd-plugins itself load.

    Raises:
        PluginError: a plugin fails to import, or its hooks are not those of ``hookspecs``.
    """

    def __init__(self, plugins_dir: str | Path | None = None) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        if os.environ.get("RECD_TRACE_PLUGINS") == "1":
            self._manager.trace.root.setwriter(sys.stderr.write)
            self._manager.enable_tracing()
        self._origins: dict[ModuleType, str] = {}
        for module, origin in _installed():
            self._add(module, origin)
        if plugins_dir is not None:
            for module, origin in _in_folder(Path(plugins_dir)):
                self._add(module, origin)

    @property
    def origins(self) -> tuple[str, ...]:
        """Where plugins were loaded from, each place once."""
        return tuple(dict.fromkeys(self._origins.values()))

    @cached_property
    def plugins(self) -> dict[str, dict[str, Registered]]:
        """Plugin classes by kind and name.

        Raises:
            PluginError: a class does not keep to its kind, or two have one kind and name.
        """
        return {kind: self._collect(kind) for kind in KINDS}

    def register_commands(self, cli: click.Group) -> None:
        """Let every plugin add its commands to ``cli``."""
        for module in self._origins:
            self._call("register_commands", module, cli=cli)

    def _add(self, module: ModuleType, origin: str) -> None:
        if module in self._origins:
            return
        try:
            self._manager.register(module)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"{origin}: {_FOLDER_MODULE.sub('', str(error))}. The hooks are those of "
                f"recd_plugins.hookspecs."
            ) from error
        if not self._manager.get_hookcallers(module):
            raise PluginError(
                f"{origin} implements no hook; decorate its functions with "
                f"recd_plugins.hookspecs.hookimpl"
            )
        self._origins[module] = origin

    def _collect(self, kind: str) -> dict[str, Registered]:
        interface, hook = KINDS[kind]
        found: dict[str, Registered] = {}
        for module, origin in self._origins.items():
            for classes in self._call(hook, module):
                for cls in _listed(classes, f"{origin}: {hook}"):
                    _check(cls, interface, f"{origin}: {hook}")
                    if cls.name in found:
                        first = found[cls.name]
                        raise PluginError(
                            f"two {kind} plugins are named {cls.name}: "
                            f"{_qualified(first.cls)} from {first.origin} and "
                            f"{_qualified(cls)} from {origin}; "
                            f"{_remedy(first.origin, origin)}"
                        )
                    found[cls.name] = Registered(cls, origin)
        return found

    def _call(self, hook: str, module: ModuleType, **arguments: Any) -> list[Any]:
        """Call a hook of one module, so that what it returns can be traced back to it."""
        others = [other for other in self._origins if other is not module]
        try:
            return list(self._manager.subset_hook_caller(hook, others)(**arguments))
        except PluginError as error:
            raise PluginError(f"{self._origins[module]}: {hook}: {error}") from error
        except PLUGIN_FAILURES as error:
            raise PluginError(
                f"{self._origins[module]}: {hook} failed: {type(error).__name__}: {error}"
            ) from error


def _listed(classes: Any, where: str) -> list[Any]:
    """What a hook returned; a generator runs here."""
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        what = "a class" if isinstance(classes, type) else repr(classes)
        raise PluginError(f"{where} returned {what}; return a list of classes")
    try:
        return list(classes)
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{where} failed: {type(error).__name__}: {error}") from error


def _installed() -> Iterator[tuple[ModuleType, str]]:
    only_own = os.environ.get("RECD_NO_THIRD_PARTY") == "1"
    for entry_point in importlib.metadata.entry_points(group=GROUP):
        distribution = entry_point.dist
        assert distribution is not None, "entry points of installed distributions have one"
        if only_own and distribution.name != OWN_DISTRIBUTION:
            continue
        origin = f"{distribution.name} {distribution.version}"
        try:
            module = entry_point.load()
        except PLUGIN_FAILURES as error:
            raise PluginError(
                f"{origin}: entry point {entry_point.name} = {entry_point.value} failed to load: "
                f"{type(error).__name__}: {error}. Mend or uninstall {distribution.name}."
            ) from error
        yield module, origin


def _in_folder(folder: Path) -> Iterator[tuple[ModuleType, str]]:
    """Every file ``*.py`` and every package in ``folder`` whose name starts with no ``_`` or ``.``.

    Each becomes a module under a name of its own, which hides no other module.
    """
    if not folder.is_dir():
        raise PluginError(f"plugins directory {folder} is not a directory")
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(("_", ".")):
            continue
        file = entry / "__init__.py" if entry.is_dir() else entry
        if file.suffix == ".py" and file.is_file():
            yield load_file(_module_name(real_path(file), entry.stem), real_path(file)), str(file)


def _module_name(file: Path, stem: str) -> str:
    return f"{_PREFIX}{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}_{stem}"


def modules_of_files(plugins: Iterable[Plugin]) -> dict[str, Path]:
    """Name and file of each module that a plugin came from by way of a folder of plugins.

    Such a module cannot be imported by its name: another process has to ``load_file`` it first.
    """
    names = {type(plugin).__module__.partition(".")[0] for plugin in plugins}
    return {
        name: Path(file)
        for name in sorted(names)
        if name.startswith(_PREFIX) and (file := sys.modules[name].__file__)
    }


def load_file(name: str, file: Path) -> ModuleType:
    """The module ``name`` of a folder of plugins, made from its file where it is not there yet.

    Raises:
        PluginError: the file failed to import.
    """
    if name in sys.modules:
        return sys.modules[name]
    is_package = file.name == "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)] if is_package else None
    )
    assert spec is not None, "a .py file has a spec"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PLUGIN_FAILURES as error:
        del sys.modules[name]
        raise PluginError(
            f"{file} failed to import: {type(error).__name__}: {error}. "
            f"Mend it, or put _ before its name to leave it out."
        ) from error
    return module


def _check(cls: Any, interface: type[Plugin], where: str) -> None:
    """Refuse what is no usable plugin class of the kind."""
    if not (isinstance(cls, type) and issubclass(cls, interface)):
        raise PluginError(
            f"{where} returned {_qualified(cls) if isinstance(cls, type) else repr(cls)}, "
            f"which is no subclass of {_qualified(interface)}"
        )
    what = f"{where}: {_qualified(cls)}"
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


def _qualified(cls: type) -> str:
    """The class by its module; of a file, whose name stands next to it, the class alone."""
    if _FOLDER_MODULE.match(cls.__module__):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _remedy(*origins: str) -> str:
    files = [origin for origin in origins if origin.endswith(".py")]
    return f"remove {files[-1]}, or rename its plugin" if files else "rename or uninstall one"

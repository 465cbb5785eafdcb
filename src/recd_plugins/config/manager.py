"""Plugin discovery in installed packages and plugin files. Imports packages on demand."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from recd_plugins.config import hookspecs
from recd_plugins.config.built_in_kinds import KINDS, OTHER_SECTIONS, OWN_SECTIONS
from recd_plugins.interfaces import Kind, Plugin
from recd_plugins.runtime.errors import PluginError
from recd_plugins.runtime.plugin_modules import (
    GROUP,
    Package,
    installed_packages,
    modules_in_folder,
    qualified,
    without_folder_prefix,
)
from recd_plugins.runtime.text import did_you_mean
from recd_plugins.runtime.versions import __version__

API_VERSION = 6
"""Version of the plugin API. Increased when the API gains features that plugins may require."""

# Hooks that return plugin classes.
_HOOKS = (
    *("register_datasets", "register_converters", "register_preprocessing", "register_ingestions"),
    *("register_poolings", "register_shardings", "register_caches", "register_plugins"),
)
#: Origin of the kinds of recd-plugins itself.
OWN = "recd-plugins"


@dataclass(frozen=True)
class Registered:
    """Plugin class with its origin, ``"distribution version"`` or the path of a plugin file."""

    cls: type[Plugin]
    origin: str


@dataclass(frozen=True)
class Broken:
    """Plugin package that cannot be loaded, with the reason."""

    name: str
    reason: str


class PluginManager:
    """Finds plugins in installed packages and ``plugins_dir``.

    Looking up a plugin such as ``acme.hash`` imports the package with the prefix ``acme``, or all
    packages if no package has the prefix. ``broken`` lists the packages that failed to load.

    Raises:
        PluginError: a file fails to import or has no plugin, or ``--without`` names an unknown
            package.
    """

    def __init__(self, plugins_dir: str | Path | None = None) -> None:
        self._packages = installed_packages()
        self._waiting = list(self._packages)
        self._owners = {package.name: package.origin for package in self._packages}
        self._broken: list[Broken] = []
        self._modules: dict[ModuleType, tuple[pluggy.PluginManager, str, Package | None]] = {}
        self._kinds = dict.fromkeys(KINDS, OWN)
        self._found: dict[str, dict[str, Registered]] = {}
        files = [] if plugins_dir is None else list(modules_in_folder(Path(plugins_dir)))
        self._files = [origin for _, origin in files]
        hooks = [self._register_kinds(module, origin) for module, origin in files]
        # Plugins may have kinds that other files define.
        for (module, origin), of_file in zip(files, hooks, strict=True):
            self._register_plugins(module, of_file, origin, None)

    @property
    def origins(self) -> tuple[str, ...]:
        """Return all origins: ``"distribution version"`` of packages, then paths of files."""
        installed = [package.origin for package in self._packages]
        return tuple(dict.fromkeys([*installed, *self._files]))

    @property
    def kinds(self) -> dict[str, Kind]:
        """Return a dict from name, such as ``sharding``, to plugin kind. Imports all packages."""
        self._load()
        return {kind.name: kind for kind in self._kinds}

    def origin_of(self, kind: Kind) -> str:
        """Return the package or file that registered a kind; ``OWN`` for built-in kinds."""
        return self._kinds[kind]

    def kinds_for(self, sections: Collection[str]) -> dict[str, Kind]:
        """Return plugin kinds by name. Imports all packages if it does not know a section."""
        if not (OWN_SECTIONS | OTHER_SECTIONS).issuperset(sections):
            self._load()
        return {kind.name: kind for kind in self._kinds}

    @property
    def broken(self) -> tuple[Broken, ...]:
        """Return the packages that failed to load. Imports all packages."""
        self._load()
        return tuple(self._broken)

    @property
    def plugins(self) -> dict[str, dict[str, Registered]]:
        """Return a dict from kind to a dict from name to plugin class. Imports all packages."""
        self._load()
        return {kind.name: dict(self._found.get(kind.name, {})) for kind in self._kinds}

    def find(self, kind: str, name: str) -> Registered | None:
        """Return the plugin, or None. Raises PluginError if the plugin's package cannot load."""
        prefix = name.partition(".")[0]
        self._load(prefix if prefix in self._owners else None)
        found = self._found.get(kind, {}).get(name)
        if found is None:
            for broken in self._broken:
                if broken.name == prefix:
                    raise PluginError(broken.reason)
        return found

    def items(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook of all packages and files, and return the items that they return.

        Raises:
            PluginError: a plugin file failed. Failed packages are added to ``broken``.
        """
        found: list[Any] = []
        for hooks, origin, package in self._installed_first():
            with self._tolerated(package):
                found += _returned(hooks, hook, origin, **arguments)
        return found

    def _installed_first(self) -> list[tuple[pluggy.PluginManager, str, Package | None]]:
        self._load()
        return sorted(self._modules.values(), key=lambda module: module[2] is None)

    def _load(self, name: str | None = None) -> None:
        now = [package for package in self._waiting if name in (None, package.name)]
        self._waiting = [package for package in self._waiting if package not in now]
        loaded = []
        for package in now:
            with self._tolerated(package):
                module = package.load()
                loaded.append((module, self._register_kinds(module, package.origin), package))
        for module, hooks, package in loaded:
            with self._tolerated(package):
                self._register_plugins(module, hooks, package.origin, package)

    @contextmanager
    def _tolerated(self, package: Package | None) -> Iterator[None]:
        try:
            yield
        except PluginError as error:
            if package is None:
                raise
            if (broken := Broken(package.name, str(error))) not in self._broken:
                self._broken.append(broken)

    def _register_kinds(self, module: ModuleType, origin: str) -> pluggy.PluginManager:
        """Register the plugin kinds that a module defines, and return the module's hooks."""
        if (needed := getattr(module, "REQUIRES_API", API_VERSION)) > API_VERSION:
            raise PluginError(
                f"{origin} needs version {needed} of recd_plugins.api, but recd-plugins "
                f"{__version__} has version {API_VERSION}. Upgrade recd-plugins with "
                "pip install --upgrade recd-plugins"
            )
        hooks = _hooks_of(module, origin)
        for kind in _returned(hooks, "register_kinds", origin):
            self._kinds.setdefault(kind, origin)
        return hooks

    def _register_plugins(
        self, module: ModuleType, hooks: pluggy.PluginManager, origin: str, package: Package | None
    ) -> None:
        if module in self._modules:
            return
        found = list(self._classes(hooks, origin))
        self._modules[module] = hooks, origin, package
        for kind, cls in found:
            other = self._found.setdefault(kind.name, {}).setdefault(
                cls.name, Registered(cls, origin)
            )
            if other.cls is not cls:
                raise PluginError(
                    f"two {kind.name} plugins are named {cls.name!r}: class {qualified(other.cls)} "
                    f"of {other.origin} and class {qualified(cls)} of {origin}. Rename or remove "
                    "one of them"
                )

    def _classes(
        self, hooks: pluggy.PluginManager, origin: str
    ) -> Iterator[tuple[Kind, type[Plugin]]]:
        """Yield ``(kind, class)`` of each plugin class that a module registers."""
        for hook in _HOOKS:
            for cls in _returned(hooks, hook, origin):
                yield self._kind_of(cls, f"{origin}: {hook}"), cls

    def _kind_of(self, cls: Any, where: str) -> Kind:
        """Return the plugin kind of a class. Imports all packages if the kind is unknown."""
        name = getattr(cls, "kind", None)
        if name not in {kind.name for kind in self._kinds}:
            self._load()
        known = {kind.name: kind for kind in self._kinds}
        if name not in known:
            shown = qualified(cls) if isinstance(cls, type) else repr(cls)
            raise PluginError(
                f"{where}: {shown} has kind = {name!r}, which no installed package registers. Use "
                f"one of these kinds: {', '.join(map(repr, known))}"
            )
        return known[name]


def installed_plugin(kind: str, name: str, options: Mapping[str, Any] | None = None) -> Plugin:
    """Create a plugin from an installed package. Raises PluginError if it cannot be loaded."""
    found = installed_class(kind, name)
    return found(found.Options.model_validate(options or {}))


def installed_class(kind: str, name: str) -> type[Plugin]:
    """Return the class of an installed plugin. Raises PluginError if it cannot be loaded."""
    manager = PluginManager()
    found = manager.find(kind, name)
    if found is None:
        meant = did_you_mean(name, manager.plugins.get(kind, {}))
        raise PluginError(
            f"no installed package has a {kind} plugin named {name!r}"
            f"{meant or '. Install the package of this plugin'}"
        )
    return found.cls


def _hooks_of(module: ModuleType, origin: str) -> pluggy.PluginManager:
    """Return a pluggy manager with the hook implementations of a module."""
    hooks = pluggy.PluginManager(GROUP)
    hooks.add_hookspecs(hookspecs)
    try:
        hooks.register(module)
        hooks.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"{origin}: {without_folder_prefix(str(error))}. See docs/plugins/index.md for the "
            "available hooks"
        ) from error
    if not hooks.get_hookcallers(module):
        raise PluginError(
            f"{origin} implements no hook. Decorate a hook function, such as "
            "register_preprocessing, with recd_plugins.api.hookimpl"
        )
    return hooks


def _returned(hooks: pluggy.PluginManager, hook: str, origin: str, **arguments: Any) -> list[Any]:
    """Call a hook, and return the items of all lists that its implementations return."""
    try:
        with redirect_stdout(sys.stderr):  # a program may read the command's own output
            answers = [each for each in getattr(hooks.hook, hook)(**arguments) if each is not None]
            return [item for each in answers for item in each]
    except PluginError as error:
        raise PluginError(f"{origin}: {hook}: {error}") from error
    except Exception as error:
        what = f"{origin}: {hook} failed: {type(error).__name__}: {error}"
        raise PluginError(f"{what}. Fix this hook, or remove the plugin") from error

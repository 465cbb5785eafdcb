"""Finds plugins: in installed packages, loaded where their names are asked for, and in files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy
from pydantic import BaseModel

from recd_plugins.config import built_in_kinds, hookspecs
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

if TYPE_CHECKING:
    import click

API_VERSION = 5
"""The version of the API: goes up by one where plugins may need what older ones lack."""

#: The kind of the hooks that are for one kind each; ``register_plugins`` is for all.
HOOKS = {
    "register_datasets": "dataset",
    "register_converters": "converter",
    "register_preprocessing": "preprocessing",
    "register_ingestions": "ingestion",
    "register_poolings": "pooling",
    "register_shardings": "sharding",
    "register_caches": "cache",
}
#: Hooks whose answers are no parts of a registry file, and what they add in words.
BESIDES = {
    "register_kinds": "kinds",
    "register_commands": "commands",
    "register_starts": "starts of recd init",
    "register_plans": "modes of recd plan",
    "register_measurements": "measurements",
    "register_topology_sections": "sections of topology files",
    "register_reports": "reports of recd run",
}

#: What kinds and plugins of recd-plugins itself come from.
OWN = "recd-plugins"

# ``wrapper`` is what the schema calls wrappers of the dataset, which stand under ``wrap``.
_TAKEN = OWN_SECTIONS | OTHER_SECTIONS | {kind.name for kind in KINDS} | {"wrap", "wrapper"}
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?")


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
    ``plugins_dir`` that is broken is an error.

    With ``RECD_TRACE_PLUGINS=1`` hook calls are written to stderr.

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
        self._kinds: dict[Kind, str] = {}
        self._found: dict[str, dict[str, list[Registered]]] = {}
        self._register_kinds(built_in_kinds, OWN)
        files = [] if plugins_dir is None else list(modules_in_folder(Path(plugins_dir)))
        self._files = [origin for _, origin in files]
        hooks = [self._register_kinds(module, origin) for module, origin in files]
        # Then plugins, which may be of kinds of one another's files.
        for (module, origin), of_file in zip(files, hooks, strict=True):
            self._register_plugins(module, of_file, origin, None)

    @property
    def origins(self) -> tuple[str, ...]:
        """Where plugins can come from, each place once: installed ones first, then files."""
        installed = [package.origin for package in self._packages]
        return tuple(dict.fromkeys([*installed, *self._files]))

    @property
    def kinds(self) -> dict[str, Kind]:
        """Kinds by name, of everything that is installed; without those that clash."""
        self._load()
        return self._usable_kinds()

    def besides(self) -> dict[str, list[str]]:
        """What each of ``origins`` adds that is no part of a registry file, in words."""
        found: dict[str, list[str]] = {origin: [] for origin in self.origins}
        for hooks, origin, _ in self._installed_first():
            for hook, words in BESIDES.items():
                if getattr(hooks.hook, hook).get_hookimpls() and words not in found[origin]:
                    found[origin].append(words)
        return found

    def origin_of(self, kind: Kind) -> str:
        """Which of ``origins`` a kind came from; of those of recd-plugins itself, that."""
        return self._kinds[kind]

    def kinds_for(self, sections: Collection[str]) -> dict[str, Kind]:
        """Kinds by name, for a file with these sections.

        Installed packages are imported where a section is of no kind of recd-plugins itself.

        Raises:
            PluginError: two kinds have such a section.
        """
        if not (OWN_SECTIONS | OTHER_SECTIONS).issuperset(sections):
            self._load()
            for kind, error in self._kind_clashes():
                if kind.section in sections:
                    raise error
        return self._usable_kinds()

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
        kinds = (Broken(kind.name, str(error)) for kind, error in self._kind_clashes())
        return (*self._broken, *kinds, *clashes)

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
            kind: {
                name: found[0]
                for name, found in self._found.get(kind, {}).items()
                if len(found) == 1
            }
            for kind in self._usable_kinds()
        }

    def find(self, kind: str, name: str) -> Registered | None:
        """The plugin of that kind and name, None where there is none.

        Raises:
            PluginError: the package that has such names is broken, or two plugins have the name.
        """
        prefix = name.partition(".")[0]
        # A name that is no package's own may be of several: all are looked at, in whatever order.
        self._load(prefix if prefix in self._owners else None)
        found = self._found.get(kind, {}).get(name)
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
                _call_hook(hooks, "register_commands", origin, cli=cli)

    def register_topology_sections(self) -> dict[str, type[BaseModel]]:
        """What installed packages have in topology files, by name; the first of two has one."""
        self._load()
        sections: dict[str, type[BaseModel]] = {}
        for hooks, origin, package in self._modules.values():
            with self._tolerated(package):
                for of_module in _call_hook(hooks, "register_topology_sections", origin):
                    if taken := sections.keys() & of_module:
                        raise PluginError(
                            f"{origin}: section {min(taken)} of topology files is another "
                            "package's; rename it, or leave one package out (--without NAME)"
                        )
                    sections.update(of_module)
        return sections

    def hand(self, hook: str, add: Callable[[Any, str], None]) -> None:
        """Let ``add`` have each of what the packages return by a hook, and the words that name one.

        Args:
            hook: whose answers are lists of no plugins.
            add: refuses what is unusable by a PluginError.

        Raises:
            PluginError: one of a file failed; of an installed package it is in ``broken`` then.
        """
        for hooks, origin, package in self._installed_first():
            with self._tolerated(package):
                for each in _listed(hooks, hook, origin):
                    add(each, f"{origin}: {hook}")

    def _installed_first(self) -> list[tuple[pluggy.PluginManager, str, Package | None]]:
        """Every module: of what is there already, a file is told."""
        self._load()
        return sorted(self._modules.values(), key=lambda module: module[2] is None)

    def _load(self, name: str | None = None) -> None:
        """Import the installed packages of that name, or all, that were not imported yet."""
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
            self._broken.append(Broken(package.name, str(error)))

    def _usable_kinds(self) -> dict[str, Kind]:
        return {kind.name: kind for kind in self._kinds if not self._like(kind)}

    def _like(self, kind: Kind) -> list[Kind]:
        """Other kinds with its name or section."""
        return [
            other
            for other in self._kinds
            if other != kind and (other.name == kind.name or other.section == kind.section)
        ]

    def _kind_clashes(self) -> Iterator[tuple[Kind, PluginError]]:
        for kind, origin in self._kinds.items():
            for other in self._like(kind)[:1]:
                yield (
                    kind,
                    PluginError(
                        f"two kinds of plugins have the name or section of the other: {kind.name} "
                        f"(section {kind.section}) of {origin} and {other.name} (section "
                        f"{other.section}) of {self._kinds[other]}; leave one out "
                        "(--without NAME)"
                    ),
                )

    def _register_kinds(self, module: ModuleType, origin: str) -> pluggy.PluginManager:
        """Take the kinds of a module; returns its hooks."""
        if (needed := getattr(module, "REQUIRES_API", API_VERSION)) > API_VERSION:
            raise PluginError(
                f"{origin} needs version {needed} of recd_plugins.api, and recd-plugins "
                f"{__version__} has {API_VERSION}: upgrade it (pip install --upgrade recd-plugins)"
            )
        hooks = _hooks_of(module, origin)
        for kind in _listed(hooks, "register_kinds", origin):
            _check_kind(kind, origin)
            self._kinds.setdefault(kind, origin)
        return hooks

    def _register_plugins(
        self, module: ModuleType, hooks: pluggy.PluginManager, origin: str, package: Package | None
    ) -> None:
        if module in self._modules:
            return
        found = list(self._classes(hooks, origin, package))
        self._modules[module] = hooks, origin, package
        for kind, cls in found:
            by_name = self._found.setdefault(kind.name, {})
            by_name.setdefault(cls.name, []).append(Registered(cls, origin))

    def _classes(
        self, hooks: pluggy.PluginManager, origin: str, package: Package | None
    ) -> Iterator[tuple[Kind, type[Plugin]]]:
        """The plugin classes that a module registers, and their kinds."""
        for hook in (*HOOKS, "register_plugins"):
            for cls in _listed(hooks, hook, origin):
                where, name = f"{origin}: {hook}", HOOKS.get(hook)
                kind = built_in_kinds.BY_NAME[name] if name else self._kind_of(cls, where)
                if not issubclass(cls, kind.interface):
                    raise PluginError(
                        f"{where} returned {qualified(cls)}, which is no subclass of "
                        f"{qualified(kind.interface)}"
                    )
                self._check_name(cls, where, package)
                yield kind, cls

    def _kind_of(self, cls: Any, where: str) -> Kind:
        """The kind of a class; of one that is not known yet, installed packages are imported."""
        name = getattr(cls, "kind", None)
        shown = qualified(cls) if isinstance(cls, type) else repr(cls)
        if name not in {kind.name for kind in self._kinds}:
            self._load()
        named = [kind for kind in self._kinds if kind.name == name]
        fitting = [kind for kind in named if issubclass(cls, kind.interface)]
        if not named:
            raise PluginError(
                f"{where}: {shown} is of kind {name}, which no package registers that is there "
                f"(the kinds: {', '.join(self._usable_kinds())}); install the one that does"
            )
        return (fitting or named)[0]

    def _check_name(self, cls: type[Plugin], where: str, package: Package | None) -> None:
        """Refuse a name that is no name, or another package's."""
        name = getattr(cls, "name", "")
        prefix, dot, _ = name.partition(".")
        own = package.name if package else None
        if not _NAME.fullmatch(name) or (not dot and prefix != own):
            raise PluginError(
                f"{where}: {qualified(cls)} is named {name!r}; name it package.part in lower case, "
                "as in 'acme.hash'"
            )
        if package is not None and prefix != own and prefix in self._owners:
            raise PluginError(
                f"{where}: {qualified(cls)} is named {name}, and names that start with {prefix}. "
                f"are those of {self._owners[prefix]}; rename it, or leave {own} out (--without "
                f"{own})"
            )


def installed_plugin(kind: str, name: str, options: Mapping[str, Any] | None = None) -> Plugin:
    """Make a plugin of an installed package with these options, without a registry.

    Raises:
        PluginError: no package has it, or the one that has it is broken.
    """
    found = installed_class(kind, name)
    return found(found.Options.model_validate(options or {}))


def installed_class(kind: str, name: str) -> type[Plugin]:
    """Return the class of a plugin of an installed package.

    Raises:
        PluginError: no package has it, or the one that has it is broken.
    """
    manager = PluginManager()
    found = manager.find(kind, name)
    if found is None:
        meant = did_you_mean(name, manager.plugins.get(kind, {}))
        raise PluginError(
            f"no installed package has {kind} {name}{meant or '; install the one that has it'}"
        )
    return found.cls


def _check_kind(kind: Kind, origin: str) -> None:
    """Refuse a kind of a third party that takes a word of recd-plugins, or breaks every file."""
    if kind in KINDS:
        return
    for word in (kind.name, kind.section):
        if word in _TAKEN or hasattr(BaseModel, word):  # a section is a field of a model
            raise PluginError(
                f"{origin}: kind {kind.name!r}: {word} is recd-plugins' own; take another name or "
                "section"
            )
    if kind.claims == "one":
        raise PluginError(
            f"{origin}: kind {kind.name!r} claims one plugin, without which no registry file would "
            "be valid while it is installed; let it claim an 'optional one'"
        )


def _hooks_of(module: ModuleType, origin: str) -> pluggy.PluginManager:
    """The hooks that a module implements, which are pluggy's own manager of it."""
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


def _call_hook(hooks: pluggy.PluginManager, hook: str, origin: str, **arguments: Any) -> list[Any]:
    """What a hook of a module returned, once for each implementation."""
    try:
        with redirect_stdout(sys.stderr):  # a command's own output may be read by a program
            returned: list[Any] = getattr(hooks.hook, hook)(**arguments)
    except PluginError as error:
        raise PluginError(f"{origin}: {hook}: {error}") from error
    except Exception as error:
        raise PluginError(f"{origin}: {hook} failed: {type(error).__name__}: {error}") from error
    return returned


def _listed(hooks: pluggy.PluginManager, hook: str, origin: str) -> list[Any]:
    """The items of the lists that a hook of a module returned."""
    returned = _call_hook(hooks, hook, origin)
    try:
        return [each for answer in returned for each in answer]
    except Exception as error:  # of no list, or of a generator
        raise PluginError(f"{origin}: {hook} failed: {type(error).__name__}: {error}") from error


def _clash(kind: str, name: str, found: list[Registered]) -> PluginError:
    first, second = found[:2]
    files = [each.origin for each in (first, second) if each.origin.endswith(".py")]
    remedy = f"remove {files[-1]}, or rename its plugin" if files else "rename one, or leave one"
    return PluginError(
        f"two {kind} plugins are named {name}: {qualified(first.cls)} from {first.origin} and "
        f"{qualified(second.cls)} from {second.origin}; {remedy}"
        + ("" if files else " out (--without NAME)")
    )

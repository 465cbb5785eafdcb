"""Finds plugins: in installed packages, loaded where their names are asked for, and in files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from recd_plugins import built_in_kinds
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Kind, Plugin
from recd_plugins.plugin_call import PLUGIN_FAILURES
from recd_plugins.plugin_check import check_api, check_class
from recd_plugins.plugin_hooks import call_hook, hooks_of, listed
from recd_plugins.plugin_kinds import OWN_SECTIONS, Kinds
from recd_plugins.plugin_modules import (
    Package,
    installed_packages,
    modules_in_folder,
    qualified,
)
from recd_plugins.plugin_sections import check_sections
from recd_plugins.words import did_you_mean

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

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
#: What is no plugin, by the hook whose list has it: for commands, which take it from there.
LISTS = {
    "register_starts": "commands",
    "register_plans": "classes",
    "register_measurements": "classes",
    "register_reports": "classes",
    "register_internals": "Internals",
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
        self._kinds = Kinds()
        self._found: dict[str, dict[str, list[Registered]]] = {}
        self._register_kinds(built_in_kinds, OWN)
        files = [] if plugins_dir is None else list(modules_in_folder(Path(plugins_dir)))
        self._files = [origin for _, origin in files]
        hooks = [self._register_kinds(module, origin) for module, origin in files]
        for (_, origin), of_file in zip(files, hooks, strict=True):
            if of_file.hook.register_topology_sections.get_hookimpls():
                raise PluginError(
                    f"{origin}: register_topology_sections is asked of installed packages alone, "
                    "since topology files are read without the folder of a command; install the "
                    "file as a package (docs/plugins/README.md says how), or leave the hook out"
                )
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
        return self._kinds.usable

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
        return self._kinds.origin(kind)

    def kinds_for(self, sections: Collection[str]) -> dict[str, Kind]:
        """Kinds by name, for a file with these sections.

        Installed packages are imported where a section is of no kind of recd-plugins itself.

        Raises:
            PluginError: two kinds have such a section.
        """
        if not OWN_SECTIONS.issuperset(sections):
            self._load()
            for section in sections:
                if clash := self._kinds.clash(section):
                    raise clash
        return self._kinds.usable

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
        kinds = (Broken(kind.name, str(error)) for kind, error in self._kinds.clashes())
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
            for kind in self._kinds.usable
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
                call_hook(hooks, "register_commands", origin, answers=False, cli=cli)

    def register_topology_sections(self) -> dict[str, type[BaseModel]]:
        """What installed packages have in topology files, by name; the first of two has one."""
        self._load()
        sections: dict[str, type[BaseModel]] = {}
        for hooks, origin, package in self._modules.values():
            with self._tolerated(package):
                for of_module in call_hook(hooks, "register_topology_sections", origin):
                    check_sections(of_module, sections, f"{origin}: register_topology_sections")
                    sections.update(of_module)
        return sections

    def hand(self, hook: str, add: Callable[[Any, str], None]) -> None:
        """Let ``add`` have each of what the packages return by a hook, and the words that name one.

        Args:
            hook: one of ``LISTS``.
            add: refuses what is unusable by a PluginError.

        Raises:
            PluginError: one of a file failed; of an installed package it is in ``broken`` then.
        """
        for hooks, origin, package in self._installed_first():
            where = f"{origin}: {hook}"
            with self._tolerated(package):
                for returned in call_hook(hooks, hook, origin):
                    for each in listed(returned, where, LISTS[hook]):
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

    def _register_kinds(self, module: ModuleType, origin: str) -> pluggy.PluginManager:
        """Take the kinds of a module; returns its hooks."""
        check_api(module, origin)
        hooks, where = hooks_of(module, origin), f"{origin}: register_kinds"
        for kinds in call_hook(hooks, "register_kinds", origin):
            self._kinds.add(listed(kinds, where, "kinds"), origin, where)
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
            where = f"{origin}: {hook}"
            for classes in call_hook(hooks, hook, origin):
                for cls in listed(classes, where, "classes"):
                    name = HOOKS.get(hook)
                    kind = built_in_kinds.BY_NAME[name] if name else self._kind_of(cls, where)
                    check_class(cls, kind.interface, where)
                    self._check_owner(cls, where, package)
                    yield kind, cls

    def _kind_of(self, cls: Any, where: str) -> Kind:
        """The kind of a class; of one that is not known yet, installed packages are imported."""
        if not (isinstance(cls, type) and issubclass(cls, Plugin) and hasattr(cls, "kind")):
            returned = qualified(cls) if isinstance(cls, type) else repr(cls)
            raise PluginError(
                f"{where} returned {returned}, which has no kind: it is no subclass of the "
                "interface of one"
            )
        if (kind := self._kinds.of(cls)) is not None:
            return kind
        self._load()
        if (kind := self._kinds.of(cls)) is not None:
            return kind
        raise PluginError(
            f"{where}: {qualified(cls)} is of kind {cls.kind}, which no package registers that is "
            f"there (the kinds: {', '.join(self._kinds.usable)}); install the one that does"
        )

    def _check_owner(self, cls: type[Plugin], where: str, package: Package | None) -> None:
        """Refuse a name that is another package's, or begins with it."""
        prefix, dot, _ = cls.name.partition(".")
        if not dot and (package is None or prefix != package.name):
            raise PluginError(
                f"{where}: {qualified(cls)} is named {cls.name}, as only a plugin of an installed "
                f"package {cls.name} may be; name it package.part, as in 'acme.hash'"
            )
        if package is not None and prefix != package.name and prefix in self._owners:
            raise PluginError(
                f"{where}: {qualified(cls)} is named {cls.name}, and names that start with "
                f"{prefix}. are those of {self._owners[prefix]}; rename it, or leave "
                f"{package.name} out (--without {package.name})"
            )


def installed_plugin(kind: str, name: str, options: Mapping[str, Any] | None = None) -> Plugin:
    """A plugin of an installed package, with these options; a benchmark needs no registry for it.

    Raises:
        PluginError: no package has it, or the one that has it is broken.
    """
    found = installed_class(kind, name)
    return found(found.Options.model_validate(options or {}))


def installed_class(kind: str, name: str) -> type[Plugin]:
    """The class of a plugin of an installed package.

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


def _clash(kind: str, name: str, found: list[Registered]) -> PluginError:
    first, second = found[:2]
    return PluginError(
        f"two {kind} plugins are named {name}: {qualified(first.cls)} from {first.origin} and "
        f"{qualified(second.cls)} from {second.origin}; {_remedy(first, second)}"
    )


def _remedy(first: Registered, second: Registered) -> str:
    if first.cls is second.cls:
        return "they are one class, which is listed twice: leave it out of one list"
    if files := [each.origin for each in (first, second) if each.origin.endswith(".py")]:
        return f"remove {files[-1]}, or rename its plugin"
    return "rename one, or leave one out (--without NAME)"

"""Plugin modules from installed packages and from files in a folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from recd_plugins.runtime.errors import PluginError
from recd_plugins.runtime.files import real_path

GROUP = "recd_plugins"
#: Environment variables: packages to exclude (``recd --without``), and the only packages to use.
WITHOUT, ONLY = "RECD_WITHOUT", "RECD_ONLY"

# Of modules of files.
_PREFIX = "recd_plugins_dir_"
_FOLDER_MODULE = re.compile(rf"{_PREFIX}[0-9a-f]{{12}}_")


@dataclass(frozen=True)
class Package:
    """Installed package of plugins. It may not be imported yet.

    Attributes:
        entry_point: entry point, named after the prefix of the package's plugins.
        distribution: name of the distribution.
        origin: ``"distribution version"``.
    """

    entry_point: importlib.metadata.EntryPoint
    distribution: str
    origin: str

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return self.entry_point.name

    def load(self) -> ModuleType:
        """Import the module. Raises PluginError on failure."""
        try:
            with redirect_stdout(sys.stderr):
                module: ModuleType = self.entry_point.load()
        except Exception as error:
            raise PluginError(
                f"{self.origin}: entry point {self.name} = {self.entry_point.value} failed to "
                f"load: {type(error).__name__}: {error}. Fix or uninstall {self.distribution}."
            ) from error
        return module


def installed_packages() -> list[Package]:
    """Return the packages of the entry-point group ``recd_plugins``.

    ``RECD_WITHOUT`` and ``RECD_ONLY`` filter them by name of package or distribution.

    Raises:
        PluginError: ``RECD_WITHOUT`` names an unknown package.
    """
    found = _packages_in(tuple(sys.path))
    without, only = _named(WITHOUT), _named(ONLY)
    known = {name for package in found for name in (package.name, package.distribution)}
    if unknown := sorted(without - known):
        raise PluginError(
            f"--without or {WITHOUT}: {', '.join(unknown)} is not an installed package of plugins. "
            f"Installed packages: {', '.join(sorted(known))}."
        )
    return [
        package
        for package in found
        if not without & {package.name, package.distribution}
        and (not only or only & {package.name, package.distribution})
    ]


@lru_cache(maxsize=1)
def _packages_in(path: tuple[str, ...]) -> list[Package]:  # noqa: ARG001
    """Return all packages, cached until ``sys.path`` changes."""
    found = []
    for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=str):
        distribution = entry_point.dist
        assert distribution is not None, "entry points of installed distributions have one"
        origin = f"{distribution.name} {distribution.version}"
        found.append(Package(entry_point, distribution.name, origin))
    return found


def _named(variable: str) -> set[str]:
    return set(filter(None, map(str.strip, os.environ.get(variable, "").split(","))))


def modules_in_folder(folder: Path) -> Iterator[tuple[ModuleType, str]]:
    """Import the ``*.py`` files and packages of a folder, except names that start with _ or a dot.

    Yields each module, under a unique name, and its file.
    """
    if not folder.is_dir():
        raise PluginError(
            f"plugins directory '{folder}' is not a directory. Use a folder that contains plugin "
            "files."
        )
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(("_", ".")):
            continue
        file = entry / "__init__.py" if entry.is_dir() else entry
        if file.suffix == ".py" and file.is_file():
            yield load_file(_module_name(real_path(file), entry.stem), real_path(file)), str(file)


def _module_name(file: Path, stem: str) -> str:
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    return f"{_PREFIX}{digest}_{stem.replace('.', '_')}"


def modules_of_files(plugins: Iterable[type]) -> dict[str, Path]:
    """Return the modules of plugins that come from a folder. Maps module names to files.

    Other processes must call ``load_file`` for each of them before they unpickle plugins.
    """
    names = {plugin.__module__.partition(".")[0] for plugin in plugins}
    return {
        name: Path(file)
        for name in sorted(names)
        if name.startswith(_PREFIX) and (file := sys.modules[name].__file__)
    }


def load_file(name: str, file: Path) -> ModuleType:
    """Return the module ``name``, imported from ``file`` if needed. PluginError on failure."""
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
        with redirect_stdout(sys.stderr):  # a program may read the command's own output
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(
            f"{file} failed to import: {type(error).__name__}: {error}. "
            "Fix the file, or rename it to start with _ to skip it."
        ) from error
    return module


def without_folder_prefix(text: str) -> str:
    """Return ``text`` without the module prefixes of plugin files."""
    return _FOLDER_MODULE.sub("", text)


def qualified(cls: type) -> str:
    """Return the class name for messages, with its public module if it has one."""
    if _FOLDER_MODULE.match(cls.__module__):
        return cls.__qualname__
    if cls.__module__.startswith("recd_plugins.interfaces."):
        return f"recd_plugins.api.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"

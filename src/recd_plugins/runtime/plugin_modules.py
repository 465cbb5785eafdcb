"""Imports plugin modules from installed packages and from the files of a folder."""

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
    """An installed plugin package. Its module is imported when ``load`` is called.

    The name of ``entry_point`` is the first part of plugin names, such as ``acme`` in
    ``acme.my_cache``. ``origin`` is the name and version of the distribution, for messages.
    """

    entry_point: importlib.metadata.EntryPoint
    distribution: str
    origin: str

    @property
    def name(self) -> str:
        """Return the name of the entry point."""
        return self.entry_point.name

    def load(self) -> ModuleType:
        """Import the module. Raises PluginError if the import failed."""
        try:
            with redirect_stdout(sys.stderr):
                module: ModuleType = self.entry_point.load()
        except Exception as error:
            raise PluginError(
                f"{self.origin}: entry point '{self.name} = {self.entry_point.value}' failed to "
                f"load: {type(error).__name__}: {error}. Fix or uninstall {self.distribution}."
            ) from error
        return module


def installed_packages() -> list[Package]:
    """Return the plugin packages that have an entry point in the group ``recd_plugins``.

    Excludes packages in ``RECD_WITHOUT``. If ``RECD_ONLY`` is set, includes only its packages.

    Raises:
        PluginError: ``RECD_WITHOUT`` names an unknown package.
    """
    found = _packages_in(tuple(sys.path))
    without, only = _named(WITHOUT), _named(ONLY)
    known = {name for package in found for name in (package.name, package.distribution)}
    if unknown := sorted(without - known):
        raise PluginError(
            f"--without or {WITHOUT}: there is no installed plugin package "
            f"{', '.join(map(repr, unknown))}. Use one of: {', '.join(map(repr, sorted(known)))}."
        )
    return [
        package
        for package in found
        if not without & {package.name, package.distribution}
        and (not only or only & {package.name, package.distribution})
    ]


@lru_cache(maxsize=1)
def _packages_in(path: tuple[str, ...]) -> list[Package]:  # noqa: ARG001
    """Return all plugin packages. The cache key is ``sys.path``."""
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
    """Import the ``*.py`` files and packages in a folder.

    Skips names that start with ``_`` or a dot. Yields each module and the path of its file.
    """
    if not folder.is_dir():
        raise PluginError(
            f"--plugins-dir: {str(folder)!r} is not a folder. Use a folder that contains plugin "
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
    """Return a dict from module name to file, for plugins from a ``--plugins-dir`` folder.

    Other processes must call ``load_file`` for these modules before they unpickle such plugins.
    """
    names = {plugin.__module__.partition(".")[0] for plugin in plugins}
    return {
        name: Path(file)
        for name in sorted(names)
        if name.startswith(_PREFIX) and (file := sys.modules[name].__file__)
    }


def load_file(name: str, file: Path) -> ModuleType:
    """Import ``file`` as the module ``name``, unless it is already imported.

    Raises PluginError if the import failed.
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
    """Remove the generated module prefixes of plugin files from a text, for messages."""
    return _FOLDER_MODULE.sub("", text)


def qualified(cls: type) -> str:
    """Return the qualified name of a class, for messages. Uses ``recd_plugins.api`` if possible."""
    if _FOLDER_MODULE.match(cls.__module__):
        return cls.__qualname__
    if cls.__module__.startswith("recd_plugins.interfaces."):
        return f"recd_plugins.api.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"

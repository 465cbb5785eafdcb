"""Modules that declare plugins: of installed packages, and of files in a folder."""

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
#: Names of packages that are left out, with commas between them; ``recd --without`` sets it.
WITHOUT = "RECD_WITHOUT"
#: Names of the only packages that are there, likewise; those that are not installed do no harm.
ONLY = "RECD_ONLY"

# Of modules of files: the name is the manager's own, and messages name the file.
_PREFIX = "recd_plugins_dir_"
_FOLDER_MODULE = re.compile(rf"{_PREFIX}[0-9a-f]{{12}}_")


@dataclass(frozen=True)
class Package:
    """An installed package of plugins, by its entry point; not imported yet.

    Attributes:
        entry_point: its name is that of the package, and its plugins are named ``NAME.part``.
        distribution: that brought it.
        origin: ``"distribution version"``.
    """

    entry_point: importlib.metadata.EntryPoint
    distribution: str
    origin: str

    @property
    def name(self) -> str:
        """The entry point's."""
        return self.entry_point.name

    def load(self) -> ModuleType:
        """The module.

        Raises:
            PluginError: it does not import.
        """
        try:
            with redirect_stdout(sys.stderr):
                module: ModuleType = self.entry_point.load()
        except Exception as error:
            raise PluginError(
                f"{self.origin}: entry point {self.name} = {self.entry_point.value} failed to "
                f"load: {type(error).__name__}: {error}. Mend or uninstall {self.distribution}."
            ) from error
        return module


def installed_packages() -> list[Package]:
    """The packages under the entry-point group ``recd_plugins``, but those that are left out.

    ``RECD_WITHOUT`` and ``RECD_ONLY`` name packages or distributions.

    Raises:
        PluginError: ``RECD_WITHOUT`` names none of them.
    """
    found = _packages_in(tuple(map(_state_of, sys.path)))
    without, only = _named(WITHOUT), _named(ONLY)
    known = {name for package in found for name in (package.name, package.distribution)}
    if unknown := sorted(without - known):
        raise PluginError(
            f"{', '.join(unknown)}, to be left out (--without, {WITHOUT}), is no installed "
            f"package of plugins; there are: {', '.join(sorted(known))}"
        )
    return [
        package
        for package in found
        if not without & {package.name, package.distribution}
        and (not only or only & {package.name, package.distribution})
    ]


@lru_cache(maxsize=1)
def _packages_in(folders: tuple[tuple[object, ...], ...]) -> list[Package]:  # noqa: ARG001
    """All packages; looked for again where ``folders``, of ``sys.path``, are not what they were.

    The entry points of every distribution are read, which takes as long as all else of a registry.
    """
    found = []
    # By name: in which order distributions are found is up to the file system.
    for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=str):
        distribution = entry_point.dist
        assert distribution is not None, "entry points of installed distributions have one"
        origin = f"{distribution.name} {distribution.version}"
        found.append(Package(entry_point, distribution.name, origin))
    return found


def _state_of(folder: str) -> tuple[object, ...]:
    """What changes where a distribution is installed or taken away: each has an entry."""
    try:
        stat = os.stat(folder or ".")
    except OSError:
        return (folder,)
    return folder, stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _named(variable: str) -> set[str]:
    return set(filter(None, map(str.strip, os.environ.get(variable, "").split(","))))


def modules_in_folder(folder: Path) -> Iterator[tuple[ModuleType, str]]:
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
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    return f"{_PREFIX}{digest}_{stem.replace('.', '_')}"  # a dot would stand for a package


def modules_of_files(plugins: Iterable[type]) -> dict[str, Path]:
    """Name and file of each module that a plugin class came from by way of a folder of plugins.

    Such a module cannot be imported by its name: another process has to ``load_file`` it first.
    """
    names = {plugin.__module__.partition(".")[0] for plugin in plugins}
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
        with redirect_stdout(sys.stderr):  # a command's own output may be read by a program
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(
            f"{file} failed to import: {type(error).__name__}: {error}. "
            f"Mend it, or put _ before its name to leave it out."
        ) from error
    return module


def without_folder_prefix(text: str) -> str:
    """``text`` without what names of modules of files begin with, which is in no file."""
    return _FOLDER_MODULE.sub("", text)


def qualified(cls: type) -> str:
    """The class by its module; of a file, whose name stands next to it, the class alone.

    An interface is by the module that plugins import it from.
    """
    if _FOLDER_MODULE.match(cls.__module__):
        return cls.__qualname__
    if cls.__module__.startswith("recd_plugins.interfaces."):
        return f"recd_plugins.api.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"

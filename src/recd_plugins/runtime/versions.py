"""Checks that the installed torch, FBGEMM and TorchRec are compatible with this package."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

#: Maps the torch version to the matching versions of fbgemm and torchrec.
SETS = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}


def fbgemm_builds() -> dict[str, str]:
    """Return a dict from distribution name to version of the installed FBGEMM builds."""
    builds = {}
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        if (version := _installed(name)) is None:
            continue
        files = importlib.metadata.files(name) or []
        if any(file.parts[0] == "fbgemm_gpu" for file in files):
            builds[name] = version
    return builds


def fbgemm_has_cuda() -> bool:
    """Return whether the CUDA build of FBGEMM is installed, and not the CPU build."""
    # PyTorch's index has a CPU build with the same name.
    builds = fbgemm_builds()
    return list(builds) == ["fbgemm-gpu"] and not builds["fbgemm-gpu"].endswith("+cpu")


@cache
def installed_set() -> str:
    """Return the installed versions as text: ``torch 2.13.0, fbgemm 1.8.0, torchrec 1.8.0``."""
    torch, fbgemm, torchrec = _versions()
    return f"torch {torch}, fbgemm {fbgemm}, torchrec {torchrec}"


def mismatch() -> str:
    """Return which versions to install if the installed versions are incompatible, else ""."""
    torch, fbgemm, torchrec = (
        None if version is None else ".".join(version.split(".")[:2]) for version in _versions()
    )
    belongs = SETS.get(torch or "")
    if belongs is None:
        return one_of_the_sets()
    if fbgemm != belongs or torchrec != belongs:
        return f"with torch {torch} install fbgemm {belongs}.* and torchrec {belongs}.*"
    return ""


def one_of_the_sets() -> str:
    """Return a text that lists the compatible versions of torch, FBGEMM and TorchRec."""
    sets = (f"torch {key}, fbgemm {value}, torchrec {value}" for key, value in SETS.items())
    return f"install one of these sets of versions: {'; '.join(sets)}"


def _versions() -> tuple[str | None, str | None, str | None]:
    fbgemm = next(iter(fbgemm_builds().values()), None)
    return _installed("torch"), fbgemm, _installed("torchrec")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Internal:
    """Private names of another package (such as torchrec) that this package or a plugin uses.

    Attributes:
        of: where the names are defined, ``"package.module"`` or ``"package.module:Class"``.
        names: attributes of the module or class, including instance attributes, or parameters of a
            function.
        used_for: feature that needs the names, for messages.
    """

    of: str
    names: tuple[str, ...]
    used_for: str

    def missing(self) -> Iterator[str]:
        """Yield a message for each of the names that the installed package does not have."""
        package = self.of.partition(".")[0]
        try:
            owner = _resolve(self.of)
        except (ModuleNotFoundError, AttributeError) as error:
            if getattr(error, "name", None) != package:  # the package is installed
                yield lacks(package, self.of.replace(":", "."), self.used_for)
            return
        where = self.of.rpartition(":")[2]
        for name in self.names:
            if not has_name(owner, name):
                yield lacks(package, f"{where}.{name}", self.used_for)


def lacks(package: str, name: str, used_for: str) -> str:
    """Return the message that an installed package does not have ``name``."""
    if package == "fbgemm_gpu":
        version = next(iter(fbgemm_builds().values()), "")
    else:
        version = _installed(package) or ""
    return f"{package} {version} lacks {name}, which {used_for} needs"


def has_name(owner: Any, name: str) -> bool:
    """Return whether a module, class or function has an attribute ``name``.

    Also searches the source files of classes and functions, to find instance attributes and
    parameters.
    """
    if hasattr(owner, name):
        return True
    if inspect.ismodule(owner):
        return hasattr(owner, "__path__") and bool(find_spec(f"{owner.__name__}.{name}"))
    modules = {sys.modules[each.__module__] for each in getattr(owner, "__mro__", (owner,))}
    files = [getattr(module, "__file__", None) or "" for module in modules]
    return any(name in _words_of(file) for file in files if file.endswith(".py"))


@cache
def _words_of(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", Path(file).read_text(encoding="utf-8")))


def _resolve(of: str) -> Any:
    module, _, path = of.partition(":")
    owner: Any = import_module(module)
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name)
    return owner

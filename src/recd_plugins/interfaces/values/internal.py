"""Names of other packages that have no public form, and which an installed version lacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.versions import fbgemm_builds, one_of_the_sets


@dataclass(frozen=True)
class Internal:
    """Names of one module, class or function of another package that it may change at any time.

    Attributes:
        of: whose they are: ``"package.module"`` or ``"package.module:Class"``. Of a class also what
            its objects have, of a function what it gives to others.
        names: attributes or modules. Public ones may be named that nothing documents.
        used_for: what needs them, as in "planning managed collision".
    """

    of: str
    names: tuple[str, ...]
    used_for: str

    def missing(self) -> Iterator[str]:
        """Names that the installed version lacks, in words. What is not installed lacks none."""
        package = self.of.partition(".")[0]
        try:
            owner = _resolve(self.of)
        except (ModuleNotFoundError, AttributeError) as error:
            if getattr(error, "name", None) != package:
                yield lacks(package, self.of.replace(":", "."), self.used_for)
            return
        where = self.of.rpartition(":")[2]
        for name in self.names:
            if not has_name(owner, name):
                yield lacks(package, f"{where}.{name}", self.used_for)


def refuse_missing(internals: Iterable[Internal]) -> None:
    """Refuse an installation that lacks one of the names.

    Raises:
        SetupError: names each that is missing, what needs it and what to install.
    """
    if missing := [message for internal in internals for message in internal.missing()]:
        raise SetupError(f"{'; '.join(missing)}: {one_of_the_sets()}")


def lacks(package: str, name: str, used_for: str) -> str:
    """That the installed version of a package lacks a name, and what needs it."""
    return f"{package} {_version(package)} lacks {name}, which {used_for} needs"


def has_name(owner: Any, name: str) -> bool:
    """Whether a module, a class or its objects have the name, or a function gives it to others."""
    if hasattr(owner, name):
        return True
    if inspect.ismodule(owner):
        try:
            import_module(f"{owner.__name__}.{name}")
        except ImportError:
            return False
        return True
    return name in _names_in(owner)


@cache
def _names_in(owner: Any) -> frozenset[str]:
    """What the methods of a class and of its bases, or a function, read, set and register."""
    if not isinstance(owner, type):
        code = getattr(inspect.unwrap(owner), "__code__", None)
        return frozenset(_names_of(code)) if code is not None else frozenset()
    names: set[str] = set()
    for cls in owner.__mro__:
        names |= getattr(cls, "__annotations__", {}).keys()
        for value in vars(cls).values():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if callable(function) and not isinstance(function, type):
                names |= _names_in(function)
    return frozenset(names)


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_of(constant)


def _resolve(of: str) -> Any:
    module, _, path = of.partition(":")
    owner: Any = import_module(module)
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name)
    return owner


def _version(package: str) -> str:
    if package == "fbgemm_gpu":
        return next(iter(fbgemm_builds().values()), "")
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

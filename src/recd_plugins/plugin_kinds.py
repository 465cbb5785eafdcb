"""The kinds that are known, and which package brought each."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from recd_plugins.built_in_kinds import KINDS
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Kind, Plugin
from recd_plugins.interfaces.kind import Claims
from recd_plugins.plugin_modules import qualified

#: Sections of registry files that are of no kind.
OTHER_SECTIONS = frozenset({"version", "model", "training"})
#: Those, and the ones of the kinds of recd-plugins itself.
OWN_SECTIONS = OTHER_SECTIONS | {kind.section for kind in KINDS}

# ``wrapper`` is what the schema calls wrappers of the dataset, which stand under ``wrap``.
_TAKEN = OWN_SECTIONS | {kind.name for kind in KINDS} | {"wrap", "wrapper"}
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_CLASS = re.compile(r"\w+(\.\w+)+")


class Kinds:
    """The kinds that modules registered, in that order."""

    def __init__(self) -> None:
        self._origins: dict[Kind, str] = {}

    def add(self, kinds: Iterable[Any], origin: str, where: str) -> None:
        """Take kinds of one module.

        Raises:
            PluginError: one is no usable kind; nothing was taken.
        """
        kinds = list(kinds)
        for kind in kinds:
            check_kind(kind, where)
        for kind in kinds:
            self._origins.setdefault(kind, origin)

    @property
    def usable(self) -> dict[str, Kind]:
        """The kinds that share neither name nor section with another, by name."""
        return {kind.name: kind for kind in self._origins if not self._others(kind)}

    def origin(self, kind: Kind) -> str:
        """Where a kind came from: ``"distribution version"`` or the path of a file."""
        return self._origins[kind]

    def clash(self, section: str) -> PluginError | None:
        """What is wrong where a file has that section, which two kinds want; else None."""
        for kind, error in self.clashes():
            if kind.section == section:
                return error
        return None

    def clashes(self) -> Iterator[tuple[Kind, PluginError]]:
        """Kinds that share a name or section, each with an error that names both."""
        for kind, origin in self._origins.items():
            for other in self._others(kind)[:1]:
                yield (
                    kind,
                    PluginError(
                        f"two kinds of plugins have the name or section of the other: {kind.name} "
                        f"(section {kind.section}) of {origin} and {other.name} (section "
                        f"{other.section}) of {self._origins[other]}; leave one out "
                        "(--without NAME)"
                    ),
                )

    def of(self, cls: type[Plugin]) -> Kind | None:
        """The kind that a plugin class says it is of, None where that is not known."""
        named = [kind for kind in self._origins if kind.name == cls.kind]
        fitting = [kind for kind in named if issubclass(cls, kind.interface)]
        return next(iter(fitting or named), None)

    def _others(self, kind: Kind) -> list[Kind]:
        return [
            other
            for other in self._origins
            if other != kind and (other.name == kind.name or other.section == kind.section)
        ]


def check_kind(kind: Any, where: str) -> None:
    """Refuse what is no usable kind.

    Raises:
        PluginError: says what is wrong, after ``where``.
    """
    if not isinstance(kind, Kind):
        raise PluginError(f"{where} returned {kind!r}, which is no recd_plugins.api.Kind")
    if kind in KINDS:
        return
    what = f"{where}: kind {kind.name!r}"
    for word in (kind.name, kind.section):
        if not (isinstance(word, str) and _WORD.fullmatch(word)):
            raise PluginError(
                f"{what}: name and section are words in lower case, as in 'audit', not {word!r}"
            )
        if word in _TAKEN or hasattr(BaseModel, word):  # a section is a field of a model
            raise PluginError(f"{what}: {word} is recd-plugins' own; take another name or section")
    if not (isinstance(kind.interface, type) and issubclass(kind.interface, Plugin)):
        raise PluginError(f"{what}: its interface is no subclass of recd_plugins.api.Plugin")
    if getattr(kind.interface, "kind", None) != kind.name:
        raise PluginError(f"{what}: {qualified(kind.interface)}.kind has to be {kind.name!r}, too")
    if kind.claims not in typing.get_args(Claims):
        raise PluginError(f"{what} claims {kind.claims!r}; {', '.join(typing.get_args(Claims))}")
    if kind.claims == "one":
        raise PluginError(
            f"{what} claims one plugin, without which no registry file would be valid while it is "
            "installed; let it claim an 'optional one'"
        )
    if not isinstance(kind.observes, bool):
        raise PluginError(f"{what}: observes is {kind.observes!r}; it is True or False")
    if not (isinstance(kind.description, str) and kind.description.strip()):
        raise PluginError(f"{what} has no description, which `recd schema` shows")
    if not (isinstance(kind.contract, str) and _CLASS.fullmatch(kind.contract)):
        raise PluginError(
            f"{what}: contract is {kind.contract!r}; it is the class with its tests, as in "
            "'acme.testing.AuditContract'"
        )

"""A kind of plugins: what stands in a section of ``registry.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recd_plugins.interfaces.plugin import Plugin

Claims = Literal["one", "optional one", "list", "by feature", "several by feature", "by table"]


@dataclass(frozen=True)
class Kind:
    """A kind of plugins, with a section of registry files to name them in.

    Attributes:
        name: what a plugin class has as ``kind``.
        interface: the abstract class that its plugins are subclasses of; its ``kind`` is ``name``.
        section: the key of registry files.
        claims: what stands there: ``one`` plugin, which every file has to name; an ``optional
            one``; a ``list``, whose order counts; or a list whose entries are each for the features
            or tables that their patterns match. Of these a feature or table has one, and with
            ``several by feature`` any number, in the order of the file.
        description: of the section, which ``recd schema`` shows.
        contract: the class with the tests that every plugin of the kind passes, by module and name.
        observes: whether no result depends on its plugins, as where they only look on: a run that
            goes on from a checkpoint may have others, and is told.
    """

    name: str
    interface: type[Plugin]
    section: str
    claims: Claims
    description: str
    contract: str
    observes: bool = False

    @property
    def claimed(self) -> Literal["feature", "table"] | None:
        """What patterns of an entry match; None where it has none."""
        if self.claims == "by table":
            return "table"
        return "feature" if "feature" in self.claims else None

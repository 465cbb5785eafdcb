"""``dsi.ray``, and the versions of Ray that it takes."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from recd_plugin_dsi.options import RayOptions
from recd_plugins.api import Ingestion, SetupError

if TYPE_CHECKING:
    from recd_plugins.api import Feed, ReadTask

#: The oldest one whose tasks ``limit.py`` can bound, and the first that is refused unseen.
OLDEST, TOO_NEW = (2, 60), (2, 61)

_INSTALL = 'pip install "recd-plugins[ray]"'


def check_ray() -> None:
    """Look at what is installed, without importing it."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError(
            f"dsi.ray runs readers on Ray, which is not installed: {_INSTALL}; or take the "
            "ingestion section out, and the trainer reads by itself"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        oldest, too_new = (".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
        raise SetupError(
            f"dsi.ray needs Ray {oldest} or newer, below {too_new}, and {version} is there: "
            f"{_INSTALL}"
        )


class RayIngestion(Ingestion):
    """Readers on Ray Data, on this machine or a cluster, as many as the trainer needs."""

    name = "dsi.ray"

    class Options(RayOptions):
        """Where readers run, how many, and how far they read ahead."""

    options: RayOptions

    def check(self) -> None:
        """Refuse to start without Ray."""
        check_ray()

    def open(self, task: ReadTask) -> Feed:
        """Readers for one rank and split, which share a cluster with those of other ranks.

        A collective call where the ranks have a process group and no ``address`` is given.
        """
        from recd_plugin_dsi.feed import RayFeed

        self.check()
        return RayFeed(task, self.options)

"""``dsi.ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugin_dsi.options import RayOptions
from recd_plugins.api import Ingestion

if TYPE_CHECKING:
    from recd_plugins.api import Feed
    from recd_plugins.api.ingestion import ReadTask


class RayIngestion(Ingestion):
    """Readers on Ray Data, on this machine or a cluster, as many as the trainer needs."""

    name = "dsi.ray"

    class Options(RayOptions):
        """Where readers run, how many, and how far they read ahead."""

    options: RayOptions

    def check(self) -> None:
        """Refuse to start without Ray.

        Raises:
            SetupError: it is missing, too old or too new; says what to install.
        """
        from recd_plugin_dsi.installed import check_ray

        check_ray()

    def open(self, task: ReadTask) -> Feed:
        """Readers for one rank and split, which share a cluster with those of other ranks.

        A collective call where the ranks have a process group and no ``address`` is given.

        Raises:
            SetupError: Ray is missing or does not start, nothing is at the address, or the cluster
                is too small for the readers.
        """
        from recd_plugin_dsi.feed import RayFeed

        self.check()
        return RayFeed(task, self.options)

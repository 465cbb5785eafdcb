"""The ingestion plugin ``dsi.ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugin_dsi.options import RayOptions, check_ray
from recd_plugins.api import Ingestion

if TYPE_CHECKING:
    from recd_plugins.api import Feed, feeds


class RayIngestion(Ingestion):
    """Reads batches with Ray Data, on this machine or a cluster, with optional autoscaling."""

    name = "dsi.ray"

    class Options(RayOptions):
        """Options of the plugin ``dsi.ray``."""

    options: RayOptions

    def check(self) -> None:
        """Raise SetupError if Ray is not installed."""
        check_ray()

    def open(self, task: feeds.ReadTask) -> Feed:
        """Start the readers of a rank, as described by ``task``.

        This is a collective call if a process group exists and the option ``address`` is null.
        """
        from recd_plugin_dsi.feed import RayFeed

        self.check()
        return RayFeed(task, self.options)

"""The ingestion of a registry: its plugin is called here, so that errors name it and its line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Feed, Ingestion, Reader
from recd_plugins.interfaces.read_task import ReadTask
from recd_plugins.plugin_call import plugin_call, plugin_items
from recd_plugins.registry import RunConfig
from recd_plugins.registry.entries import Entry, at_entry
from recd_plugins.values.model_input import ModelInput


def check_ingestion(registry: RunConfig) -> None:
    """Refuse to start where the registry's ingestion cannot run.

    Raises:
        RegistryError: it cannot; names the line of its entry.
    """
    if (entry := registry.ingestion) is None:
        return
    with at_entry(registry.path, entry), plugin_call(entry.plugin, "check"):
        entry.plugin.check()


class IngestionFeed(Feed):
    """What the ingestion of a registry opens for one rank and split.

    Args:
        path: of the registry file.
        entry: of its ingestion.
        task: of the rank.

    Raises:
        RegistryError: it cannot run here; names the line of its entry.
        PluginError: the ingestion failed.
    """

    def __init__(self, path: Path, entry: Entry[Ingestion], task: ReadTask) -> None:
        self._plugin = entry.plugin
        with at_entry(path, entry), plugin_call(self._plugin, "open"):
            self._feed = self._plugin.open(task)
        if not isinstance(self._feed, Feed):
            raise PluginError(f"{self._plugin.title}: open returned {self._feed!r:.80}, no Feed")

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """See ``Feed.read``."""
        with plugin_call(self._plugin, "read"):
            batches = self._feed.read(reader)
        if not isinstance(batches, Iterable):
            raise PluginError(
                f"{self._plugin.title}: read of its feed returned {batches!r:.80}; expected batches"
            )
        return plugin_items(self._plugin, "reading", batches)

    def report(self) -> Mapping[str, float]:
        """See ``Feed.report``."""
        with plugin_call(self._plugin, "report"):
            return self._feed.report()

    def close(self) -> None:
        """See ``Feed.close``."""
        with plugin_call(self._plugin, "close"):
            self._feed.close()

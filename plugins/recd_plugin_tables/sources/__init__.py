"""Sources: where the rows of a user's table are read from, as they are written."""

from recd_plugin_tables.sources.as_trained import AsTrained, TrainedColumns
from recd_plugin_tables.sources.opening import has_local_files, open_source
from recd_plugin_tables.sources.source import Source, SourceOptions

__all__ = [
    "AsTrained",
    "Source",
    "SourceOptions",
    "TrainedColumns",
    "has_local_files",
    "open_source",
]

"""An example sharding plugin: table-wise sharding with copies of frequent rows on every rank."""

from collections.abc import Sequence

from recd_plugin_hotrows.sharding import HotRows
from recd_plugins.api import Sharding, hookimpl

REQUIRES_API = 6


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    return [HotRows]

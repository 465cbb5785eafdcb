"""A package with a sharding of its own: the hottest rows on every rank, the others table-wise."""

from collections.abc import Sequence

from recd_plugin_hotrows.sharding import HotRows
from recd_plugins.api import Sharding, hookimpl

REQUIRES_API = 6


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    return [HotRows]

"""What sharding and cache entries do to the tables of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import Cache, Setting, Sharding, Table, TablePart
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, Registry, at_entry
from recd_plugins.registry.checked_part import CheckedPart

logger = logging.getLogger(__name__)


def prepare_parts(
    registry: Registry, tables: Sequence[Table], setting: Setting
) -> dict[str, TablePart]:
    """The table parts of entries, by the field of the entry.

    Args:
        registry: its sharding and cache entries.
        tables: of the model.
        setting: the ranks that it will be sharded for.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, a plugin refuses a table,
            or a table with kernels of its own is on every rank or needs TorchRec's.
        PluginError: a plugin returns what is no part, or has kernels of a table of another's.
    """
    names = [table.name for table in tables]
    sharded, cached = registry.claim("sharding", names), registry.claim("cache", names)
    parts: dict[str, TablePart] = {}
    why: dict[str, str] = {}
    for entry in registry.sharding:
        claimed = [table for table in tables if sharded.get(table.name) is entry]
        if (part := _part(registry.path, entry, claimed, setting)) is not None:
            parts[entry.field] = part
            why |= CheckedPart(registry.path, entry, part).needs_stock_kernels()
    for cache in registry.cache:
        claimed = [table for table in tables if cached.get(table.name) is cache]
        if (part := _part(registry.path, cache, claimed, setting)) is not None:
            parts[cache.field] = part
            _check_kernels(registry.path, cache, part, claimed, sharded, why)
    return parts


def _part(
    path: Path, entry: Entry[Sharding] | Entry[Cache], tables: list[Table], setting: Setting
) -> TablePart | None:
    plugin = entry.plugin
    with plugin_call(plugin, "part"), at_entry(path, entry):
        part = plugin.part(tables, setting)
    if part is not None and not isinstance(part, TablePart):
        raise PluginError(f"{plugin.name}: part returned {part!r}; expected a TablePart or None")
    return part


def _check_kernels(
    path: Path,
    entry: Entry[Cache],
    part: TablePart,
    claimed: Sequence[Table],
    sharded: Mapping[str, Entry[Sharding]],
    why: Mapping[str, str],
) -> None:
    """Refuse kernels of tables that are another's, on every rank, or in need of TorchRec's."""
    kernels = CheckedPart(path, entry, part).asked("kernels", [part])
    if kernels is None:
        return
    own = [table.name for table in claimed]
    for table in kernels.tables:
        if table not in own:
            raise PluginError(
                f"{entry.plugin.name}: kernels are of table {table}, which is none of its tables: "
                f"{', '.join(own)}"
            )
        if (sharding := sharded.get(table)) is None:
            continue
        where = f"{sharding.plugin.name} ({sharding.field}, line {sharding.line})"
        with at_entry(path, entry):
            if sharding.plugin.replicates:
                raise SetupError(
                    f"table {table} has a cache, and {where} puts it whole on every rank, where "
                    "nothing is fetched: leave one of them out, or shard the table by "
                    "rows, by columns or as a whole"
                )
            if table in why:
                raise SetupError(f"table {table} has a cache, and {where} {why[table]}")
    logger.info("%s caches %s", entry.plugin.name, ", ".join(kernels.tables))

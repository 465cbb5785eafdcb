"""What cache plugins choose for the tables of a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from recd_plugins.distributed.cached.spec import TableCache
from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Setting, Sharding, Table
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, at_entry
from recd_plugins.registry.table_answers import check_answers

if TYPE_CHECKING:
    from recd_plugins.planning.caching import CachePlan
    from recd_plugins.registry import Registry

logger = logging.getLogger(__name__)


def prepare_caches(
    registry: Registry, tables: Sequence[Table], setting: Setting, tiered: Collection[str]
) -> tuple[dict[str, TableCache], dict[str, CachePlan]]:
    """The caches of ``tables`` by name, and what is expected of them by field of the entry.

    Args:
        registry: its cache entries.
        tables: of the model.
        setting: the ranks that it will be sharded for.
        tiered: fields of the sharding entries that have tiers of rows.

    Raises:
        RegistryError: a pattern matches no table, two entries claim one, a plugin refuses a table,
            or a table with a cache is on every rank or has tiers.
        PluginError: a plugin caches a table that is none of its own.
    """
    names = [table.name for table in tables]
    claims, sharded = registry.claim("cache", names), registry.claim("sharding", names)
    caches: dict[str, TableCache] = {}
    plans: dict[str, CachePlan] = {}
    for entry in registry.cache:
        claimed = [table for table in tables if claims.get(table.name) is entry]
        with plugin_call(entry.plugin, "caches"), at_entry(registry.path, entry):
            chosen = dict(entry.plugin.caches(claimed, setting))
        check_answers(entry.plugin, "caches", chosen, claimed, TableCache, expected="a TableCache")
        for name in chosen:
            if (sharding := sharded.get(name)) is not None:
                with at_entry(registry.path, entry):
                    _refuse_copies(name, sharding, tiered)
        with plugin_call(entry.plugin, "plan"), at_entry(registry.path, entry):
            plan = entry.plugin.plan(claimed, setting)
        caches |= chosen
        if plan is not None:
            plans[entry.field] = plan
        if chosen:
            logger.info("%s caches %s", entry.plugin.name, ", ".join(chosen))
    return caches, plans


def _refuse_copies(table: str, entry: Entry[Sharding], tiered: Collection[str]) -> None:
    """Refuse a cache of a table of which other ranks have copies.

    Copies are written through to their table when state is saved, past the fast tier.
    """
    where = f"{entry.plugin.name} ({entry.field}, line {entry.line})"
    if entry.plugin.replicates:
        raise SetupError(
            f"table {table} has a cache, and {where} puts it whole on every rank, where nothing is "
            "fetched: leave one of them out, or shard the table with torchrec.table_wise, row_wise "
            "or column_wise"
        )
    if entry.field in tiered:
        raise SetupError(
            f"table {table} has a cache, and {where} has tiers of its rows, whose cold tier cannot "
            "be cached: leave one of them out; torchrec.row_wise shards it alike without tiers"
        )

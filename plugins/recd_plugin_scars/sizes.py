"""How many rows of each table are cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from recd_plugin_scars.planning import CachePlan, TableLoad, row_bytes
from recd_plugins.api import SetupError
from recd_plugins.api.files import read_bytes
from recd_plugins.api.registry import shortened

if TYPE_CHECKING:
    from recd_plugin_scars.options import CacheOptions
    from recd_plugin_scars.planning.traffic import Policy
    from recd_plugins.api import Setting, Table


class _Step(TypedDict):
    """How ``CachePlan`` is told of a step."""

    batch_size: int
    optimizer: str
    held: float
    policy: Policy


# Of the memory where tables are looked up, for caches of no given size.
_SHARE_OF_MEMORY = 0.5


def plan_caches(options: CacheOptions, tables: Sequence[Table], setting: Setting) -> CachePlan:
    """The caches of ``tables`` together, and what is expected of them.

    Raises:
        SetupError: the caches are larger than a table, or than the memory of the ranks.
        DataError: the data cannot be read, or the access profile is not of these tables.
    """
    loads = _loads(options, tables, setting)
    step: _Step = {
        "batch_size": setting.batch_size * setting.world_size,
        "optimizer": setting.optimizer,
        "held": 1 if options.lookahead else 0,
        # FBGEMM's own keeps what was used last, too.
        "policy": "lru" if options.policy == "uvm" else options.policy,
    }
    if options.rows is not None or options.share is not None:
        plan = CachePlan.of(loads, _sizes(options, tables), **step)
    elif options.bytes is not None:
        plan = CachePlan.within(loads, read_bytes(options.bytes), **step)
    else:
        plan = CachePlan.within(loads, _room(options, loads, setting), **step)
    _check_memory(plan, setting)
    return plan


def _room(options: CacheOptions, loads: Mapping[str, TableLoad], setting: Setting) -> float | None:
    """Bytes that caches of no given size may take; None where memory is not known.

    The rest is for the batch, the layers, and on CPU for tables in host memory.
    """
    if setting.memory_bytes is None:
        return None
    there = float(setting.memory_bytes * setting.world_size)
    if setting.device_type == "cpu" and options.storage == "host":
        there -= sum(
            load.num_embeddings * row_bytes(load.embedding_dim, setting.optimizer)
            for load in loads.values()
        )
    return max(0.0, _SHARE_OF_MEMORY * there)


def _loads(
    options: CacheOptions, tables: Sequence[Table], setting: Setting
) -> dict[str, TableLoad]:
    profile = options.accesses(tables, setting)
    return {
        table.name: TableLoad(
            profile.covering(table.name, table.num_embeddings), table.embedding_dim
        )
        for table in tables
    }


def _sizes(options: CacheOptions, tables: Sequence[Table]) -> dict[str, int]:
    """Rows of each table, of the options ``rows`` and ``share``."""
    if options.share is not None:
        return {table.name: round(options.share * table.num_embeddings) for table in tables}
    assert options.rows is not None
    for table in tables:
        if options.rows > table.num_embeddings:
            raise SetupError(
                f"the option rows is {options.rows:,}, and table {table.name} has "
                f"{table.num_embeddings:,} rows: lower it, narrow the patterns of the entry, or "
                "take the option share"
            )
    return {table.name: options.rows for table in tables}


def _check_memory(plan: CachePlan, setting: Setting) -> None:
    """Refuse caches that no sharding could fit; the planner finds out about the others."""
    there = None if setting.memory_bytes is None else setting.memory_bytes * setting.world_size
    if there is not None and plan.cached_bytes > there:
        raise SetupError(
            f"the caches of {shortened(list(plan.tables))} take {_gib(plan.cached_bytes)}, and the "
            f"{setting.device_type} memory of all {setting.world_size} ranks is {_gib(there)}: "
            "lower rows, share or bytes, or leave them out, which caches what pays"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"

"""What sharding and cache entries ask of the planner, and plans that do otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ParameterSharding, ShardingType

from recd_plugins.data.prepared import Prepared
from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import Table, TablePart
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry
from recd_plugins.registry.table_answers import check_answers
from recd_plugins.words import did_you_mean


@dataclass(frozen=True)
class EntryConstraints:
    """What one entry asks of the planner.

    Attributes:
        where: it stands, as errors begin.
        plugin: its name.
        of_tables: constraints by table name.
    """

    where: str
    plugin: str
    of_tables: Mapping[str, ParameterConstraints]


def entry_constraints(prepared: Prepared, tables: Sequence[Table]) -> list[EntryConstraints]:
    """Of each sharding and cache entry of the registry, in the order of the file.

    Args:
        prepared: whose registry it is. ``prepare`` has checked the patterns on the model as it was.
        tables: of the model, as plugins left it.

    Raises:
        PluginError: a plugin constrains a table that is none of its own, or by numbers that are
            none.
    """
    registry = prepared.registry
    of_parts = {part.entry.field: part for part in prepared.checked_parts}
    return [
        EntryConstraints(
            f"{registry.path}:{entry.line} {entry.field}: ",
            entry.plugin.name,
            _constraints(
                of_parts.get(entry.field),
                entry,
                [table for table in tables if entry.matches(table.name)],
            ),
        )
        for entry in (*registry.sharding, *registry.cache)
    ]


def check_plan(asked: Sequence[EntryConstraints], plan: Mapping[str, ParameterSharding]) -> None:
    """Refuse a plan that shards a table otherwise than its entry says.

    Args:
        asked: of all entries.
        plan: of the tables of a module, by name.

    Raises:
        SetupError: names the entry, the table and what the plan has.
    """
    planned = [
        (entry, name, allowed, chosen)
        for entry in asked
        for name, constraints in entry.of_tables.items()
        if (sharding := plan.get(name)) is not None
        for allowed, chosen in (
            (constraints.sharding_types, sharding.sharding_type),
            (constraints.compute_kernels, sharding.compute_kernel),
        )
    ]
    for entry, name, allowed, chosen in planned:
        if allowed and chosen not in allowed:
            raise SetupError(
                f"{entry.where}{entry.plugin} asks for {' or '.join(allowed)} of table {name}, "
                f"and the plan has {chosen}: plan with planner() of what wrap or prepare returned, "
                "or leave the entry out"
            )


def _constraints(
    part: TablePart | None, entry: Entry[Any], tables: list[Table]
) -> dict[str, ParameterConstraints]:
    plugin = entry.plugin
    found: dict[str, ParameterConstraints] = {}
    for asked in (plugin,) if part is None else (plugin, part):
        with plugin_call(plugin, "constraints"):
            constraints = asked.constraints(tables)
        check_answers(
            plugin,
            "constraints",
            constraints,
            tables,
            ParameterConstraints,
            expected="torchrec's ParameterConstraints",
        )
        for name, of_table in constraints.items():
            _check_words(plugin.title, name, of_table)
            _check_numbers(plugin.title, name, of_table)
        found |= constraints
    return found


def _check_words(plugin: str, table: str, constraints: ParameterConstraints) -> None:
    for name, known in (
        ("sharding_types", ShardingType),
        ("compute_kernels", EmbeddingComputeKernel),
    ):
        words = getattr(constraints, name)
        if isinstance(words, str) or any(type(word) is not str for word in words or ()):
            raise PluginError(
                f"{plugin}: constraints returned {name} {words!r} for table {table}; expected a "
                "list of texts, as [ShardingType.ROW_WISE.value]"
            )
        values = [each.value for each in known]
        if unknown := [word for word in words or () if word not in values]:
            raise PluginError(
                f"{plugin}: constraints returned {name} {words!r} for table {table}; expected "
                f"TorchRec's {', '.join(values)}{did_you_mean(unknown[0], values)}"
            )


def _check_numbers(plugin: str, table: str, constraints: ParameterConstraints) -> None:
    for name in ("pooling_factors", "num_poolings", "batch_sizes"):
        numbers = getattr(constraints, name) or ()
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise PluginError(
                f"{plugin}: constraints returned {name} {list(numbers)} for table {table}; "
                "expected finite numbers, none below 0"
            )

"""What sharding and cache entries ask of the planner, and plans that do otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ParameterSharding

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.errors import PluginError, SetupError
from recd_plugins.interfaces import Table, TablePart
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry

_UNSET = ParameterConstraints()


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


def entry_constraints(prepared: PreparedModel, tables: Sequence[Table]) -> list[EntryConstraints]:
    """Of each sharding and cache entry of the registry, in the order of the file.

    Args:
        prepared: whose registry it is. ``prepare`` has checked the patterns on the model as it was.
        tables: of the model, as plugins left it.

    Raises:
        PluginError: a plugin constrains a table that is none of its own, or by what TorchRec does
            not take.
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


def entries_of_tables(prepared: PreparedModel) -> dict[str, str]:
    """Titles of the sharding, cache and optimizer entries by the name of a table of theirs."""
    registry = prepared.registry
    entries = (*registry.sharding, *registry.cache, *registry.entries("optimizer"))
    titles = {
        table.name: [entry.plugin.title for entry in entries if entry.matches(table.name)]
        for table in prepared.tables
    }
    return {name: " and ".join(of_table) for name, of_table in titles.items() if of_table}


def set_fields(constraints: ParameterConstraints) -> list[str]:
    """Names of the fields that are not as they are where nobody sets them."""
    return [
        field.name
        for field in fields(constraints)
        if getattr(constraints, field.name) != getattr(_UNSET, field.name)
    ]


def contradicting(first: ParameterConstraints, second: ParameterConstraints) -> list[str]:
    """Names of the fields that both set, each to another value."""
    both = {*set_fields(first)} & {*set_fields(second)}
    return sorted(field for field in both if getattr(first, field) != getattr(second, field))


def merged_constraints(
    first: ParameterConstraints, second: ParameterConstraints
) -> ParameterConstraints:
    """The first, with what the second sets."""
    return replace(first, **{field: getattr(second, field) for field in set_fields(second)})


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
        for name, of_table in constraints.items():
            before = found.get(name, of_table)
            for field in contradicting(before, of_table):
                one, other = getattr(before, field), getattr(of_table, field)
                raise PluginError(
                    f"{plugin.title}: its constraints and those of its part set different {field} "
                    f"of table {name} ({one} and {other}); let one of them say it"
                )
            found[name] = merged_constraints(before, of_table)
    return found

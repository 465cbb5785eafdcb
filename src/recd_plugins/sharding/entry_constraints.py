"""Planner constraints of sharding and cache entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.plugin import plugin_call

_UNSET = ParameterConstraints()


@dataclass(frozen=True)
class EntryConstraints:
    """Planner constraints of one entry, keyed by table name; messages start with ``where``."""

    where: str
    plugin: str
    of_tables: Mapping[str, ParameterConstraints]


def entry_constraints(prepared: PreparedModel, tables: Sequence[Table]) -> list[EntryConstraints]:
    """Return the constraints of each sharding and cache entry, in the order of the file."""
    registry = prepared.registry
    of_parts = {part.entry.field: part for part in prepared.plugin_strategies}
    found = []
    for entry in (*registry.sharding, *registry.cache):
        own = [table for table in tables if entry.matches(table.name)]
        asked: dict[str, ParameterConstraints] = {}
        each: Any
        for each in filter(None, (entry.plugin, of_parts.get(entry.field))):
            with plugin_call(entry.plugin, "constraints"):
                for name, constraints in each.constraints(own).items():
                    asked[name] = merged_constraints(asked.get(name, _UNSET), constraints)
        where = f"{registry.path}:{entry.line} {entry.field}: "
        found.append(EntryConstraints(where, entry.plugin.name, asked))
    return found


def set_fields(constraints: ParameterConstraints) -> list[str]:
    """Return the names of the fields that are set in ``constraints``."""
    return [
        field.name
        for field in fields(constraints)
        if getattr(constraints, field.name) != getattr(_UNSET, field.name)
    ]


def merged_constraints(
    first: ParameterConstraints, second: ParameterConstraints
) -> ParameterConstraints:
    """Return ``first``, overridden by the fields that are set in ``second``."""
    return replace(first, **{field: getattr(second, field) for field in set_fields(second)})

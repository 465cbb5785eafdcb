"""The ranks that table strategies allow for their tables, and tables kept on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType

from recd_plugins.config.entries import CheckedPart, at_entry
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.text import shortened

_ON_ONE_RANK = (ShardingType.TABLE_WISE.value,)
_ON_SOME_RANKS = (*_ON_ONE_RANK, ShardingType.COLUMN_WISE.value)
#: Types whose shards the ranks of one node hold.
ON_A_NODE = (ShardingType.TABLE_ROW_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


@dataclass(frozen=True)
class TableGroup:
    """Tables whose ranks are constrained.

    Attributes:
        tables: their names; several stay on one rank.
        ranks: that may hold rows of them.
        parts: the strategies that say so.
    """

    tables: frozenset[str]
    ranks: frozenset[int]
    parts: tuple[CheckedPart, ...]

    def __str__(self) -> str:
        """The tables, where they go, and the entries that say so, for errors."""
        return f"{'' if self.is_together else min(self.tables) + ' '}{self.words}"

    @property
    def is_together(self) -> bool:
        """Whether they stay on one rank."""
        return len(self.tables) > 1

    @property
    def words(self) -> str:
        """What is said of each of the tables, for ``recd plan``."""
        together = f"{shortened(sorted(self.tables))} together " if self.is_together else ""
        one = "one of " if self.is_together and len(self.ranks) > 1 else ""
        said_by = " and ".join(part.place for part in self.parts)
        return f"{together}on {one}{in_words(self.ranks)}, says {said_by}"

    def as_json(self) -> dict[str, Any]:
        """The ranks that are allowed, and the tables on one of them."""
        return {"allowed_ranks": sorted(self.ranks), "together": sorted(self.tables)}

    def nodes(self, ranks_per_node: int) -> list[tuple[int, ...]]:
        """The nodes all of whose ranks are among these."""
        firsts = range(0, max(self.ranks) + 1, ranks_per_node)
        nodes = (tuple(range(first, first + ranks_per_node)) for first in firsts)
        return [node for node in nodes if self.ranks.issuperset(node)]


def in_words(ranks: frozenset[int]) -> str:
    """The ranks by number."""
    return f"rank{'s' * (len(ranks) > 1)} {shortened([str(rank) for rank in sorted(ranks)])}"


def table_groups(
    parts: Sequence[CheckedPart], tables: Sequence[str], world_size: int
) -> tuple[TableGroup, ...]:
    """Return the tables with constrained ranks, joined if they share a rank.

    Raises:
        RegistryError: there is no such rank, or no rank is left to a table.
    """
    every = frozenset(range(world_size))
    groups: list[TableGroup] = []
    for part in parts:
        for said in _said(part, [t for t in tables if part.entry.matches(t)], every):
            met = [group for group in groups if group.tables & said.tables]
            with at_entry(part.path, part.entry):
                joined = _joined(said, met)
            groups = [group for group in groups if group not in met] + [joined]
    return tuple(group for group in groups if group.is_together or group.ranks != every)


def _said(part: CheckedPart, tables: Sequence[str], every: frozenset[int]) -> Iterator[TableGroup]:
    for table in tables:
        if (ranks := part.ranks(table)) is None:
            continue
        if missing := frozenset(ranks) - every:
            with at_entry(part.path, part.entry):
                raise SetupError(
                    f"{part.entry.plugin.name} wants table {table} on {in_words(missing)}, and "
                    f"there are {len(every)}, from 0: choose among the setting's world_size"
                )
        yield TableGroup(frozenset({table}), frozenset(ranks), (part,))
    for group in part.together():
        if group:
            yield TableGroup(frozenset(group), every, (part,))


def _joined(said: TableGroup, met: Sequence[TableGroup]) -> TableGroup:
    """What a part says with what was said of the same tables before."""
    joined = said
    for group in met:
        joined = TableGroup(
            joined.tables | group.tables,
            joined.ranks & group.ranks,
            tuple(dict.fromkeys((*group.parts, *joined.parts))),
        )
    if not joined.ranks:
        said_before = "; ".join(map(str, (*met, said)))
        raise SetupError(f"no rank is left where all that is said can hold: {said_before}")
    return joined


def with_ranks(
    constraints: Mapping[str, ParameterConstraints],
    groups: Sequence[TableGroup],
    topology: Topology,
) -> dict[str, ParameterConstraints]:
    """Return constraints without sharding types that put shards on other ranks.

    Raises:
        SetupError: a table is left without a sharding type.
    """
    narrowed = dict(constraints)
    for group in groups:
        kinds: tuple[str, ...]
        if group.is_together:
            kinds = _ON_ONE_RANK
        elif group.nodes(topology.local_world_size):
            kinds = (*_ON_SOME_RANKS, *ON_A_NODE)
        else:
            kinds = _ON_SOME_RANKS
        for name in group.tables:
            wanted = constraints.get(name, ParameterConstraints())
            left = [kind for kind in wanted.sharding_types or kinds if kind in kinds]
            if not left:
                raise SetupError(
                    f"table {name} is to be sharded {', '.join(wanted.sharding_types or ())}, "
                    f"which has rows of it elsewhere than {group}: let its sharding be one of "
                    f"{', '.join(kinds)}, or its rank be left to the planner"
                )
            narrowed[name] = replace(wanted, sharding_types=left)
    return narrowed

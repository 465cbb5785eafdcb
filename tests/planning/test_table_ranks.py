"""Table strategies constrain the ranks of tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from tests.planning.test_planner import Model, make, prepared, profile, registry
from torchrec.distributed.planner.types import ParameterConstraints

from recd_plugins.api import SetupError, Sharding, TableStrategy
from recd_plugins.planning.planner import Planned, RegistryPlanner, build_planner

Ranks = Mapping[str, Collection[int]]


class Part(TableStrategy):
    def __init__(self, ranks: Ranks, groups: Sequence[Collection[str]], kind: str | None) -> None:
        self._ranks, self._groups, self._kind = ranks, groups, kind

    def constraints(self, tables: Any) -> Mapping[str, ParameterConstraints]:
        kinds = [self._kind] if self._kind else None
        return {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}

    def ranks(self, table: str) -> Collection[int] | None:
        return self._ranks.get(table)

    def together(self) -> Sequence[Collection[str]]:
        return self._groups


class Placed(Sharding):
    name = "acme.placed"


class Kept(Sharding):
    name = "acme.kept"


def planner(
    *entries: tuple[list[str], TableStrategy],
    ranks: int = 4,
    a_node: int | None = None,
    rows: int = 999,
) -> tuple[RegistryPlanner, Any]:
    """For a model whose entries, from line 10 on, have the parts."""
    plugins = [make(cls) for cls in (Placed, Kept)]
    reg = registry(*zip(plugins, [patterns for patterns, _ in entries], strict=False))
    ready = prepared(reg, Model(rows))
    parts = {f"sharding[{i}]": part for i, (_, part) in enumerate(entries)}
    ready = type(ready)(ready.registry, ready.model, ready.placement, {}, ready.tables, parts)
    found = build_planner(ready, world_size=ranks, local_world_size=a_node, profile=profile())
    return found, ready


def planned(*entries: tuple[list[str], TableStrategy], **setting: Any) -> Planned:
    found, ready = planner(*entries, **setting)
    return found.plan_in_detail(ready.model, ready.sharders())


def where(made: Planned) -> dict[str, list[int]]:
    return {option.name: [shard.rank for shard in option.shards] for option in made.options}


def part(ranks: Ranks | None = None, *groups: Collection[str], kind: str | None = None) -> Part:
    return Part(ranks or {}, groups, kind)


def test_a_table_goes_to_its_ranks() -> None:
    made = planned((["*"], part({"a": [3], "b": [2], "s": [2, 3]})))
    ranks = where(made)
    assert (ranks["a"], ranks["b"]) == ([3], [2])
    assert set(ranks["s"]) <= {2, 3}
    spec = made.sharding.plan["bags"]["a"].sharding_spec
    assert [shard.placement.rank() for shard in spec.shards] == [3]
    assert all(shard.rank in (2, 3) for option in made.options for shard in option.shards)


def test_tables_stay_together_on_the_least_busy_rank() -> None:
    assert where(planned((["*"], part({"s": [0]}, ["a", "b"])))) == {"a": [1], "b": [1], "s": [0]}
    # What two entries say counts for all.
    ranks = where(planned((["a", "b"], part({"a": [1, 2]}, ["a", "b"])), (["s"], part({"s": [0]}))))
    assert ranks["a"] == ranks["b"] in ([1], [2])
    ranks = where(
        planned((["a", "b", "s"], part({"a": [1, 2], "s": [2, 3]}, ["a", "b"], ["b", "s"])))
    )
    assert ranks == {"a": [2], "b": [2], "s": [2]}


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise"])
def test_a_node_is_all_of_its_ranks(kind: str) -> None:
    ranks = where(planned((["b"], part({"b": [2, 3]}, kind=kind)), a_node=2))
    assert set(ranks["b"]) <= {2, 3}
    assert kind == "table_column_wise" or ranks["b"] == [2, 3]


def test_nothing_said_changes_nothing() -> None:
    said, unsaid = (planned((["*"], each)) for each in (part({"a": range(4)}), TableStrategy()))
    assert said.sharding == unsaid.sharding
    assert said.groups == ()


def test_a_plan_shows_who_says_it() -> None:
    made = planned((["*"], part({"s": [0]}, ["a", "b"])))
    (kept,) = [group for group in made.groups if "a" in group.tables]
    assert kept.words == (
        "a, b together on one of ranks 0, 1, 2, 3, says acme.placed (registry.yaml:10 sharding[0])"
    )
    assert kept.as_json() == {"allowed_ranks": [0, 1, 2, 3], "together": ["a", "b"]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(["*"], part({"a": [4]}))], r"of 4 ranks none is left for a by acme.placed"),
        ([(["*"], part({"a": [0], "b": [1]}, ["a", "b"]))], "none is left for a, b by acme.placed"),
        (
            [(["a"], part({"a": [1]}, kind="row_wise"))],
            r"table a is to be sharded row_wise, not only on rank 1, says acme.placed",
        ),
        (
            [(["*"], part(None, ["a", "b"], kind="column_wise"))],
            r"table [ab] is to be sharded column_wise, not only a, b together on one of ranks 0, 1",
        ),
    ],
)
def test_a_contradiction_names_who_says_it(entries: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        planner(*entries)

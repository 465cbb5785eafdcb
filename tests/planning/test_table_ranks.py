"""Table parts say on which ranks tables go, and which stay together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from os import sysconf
from typing import Any

import pytest
from tests.planning.test_planner import Model, make, prepared, profile, registry
from torchrec.distributed.planner.types import ParameterConstraints

from recd_plugins.api import RecdError, RowMemory, SetupError, Sharding, TableStrategy
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.planning.planner import Planned, RegistryPlanner, build_planner
from recd_plugins.runtime.errors import NoPlanError

Ranks = Mapping[str, Collection[int]]


class Part(TableStrategy):
    """Puts tables where it is told to."""

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
    """Has such a part."""

    name = "acme.placed"


class Kept(Sharding):
    """Has such a part, too."""

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


def test_columns_are_split_over_the_ranks_of_a_table() -> None:
    entry = (["s"], part({"s": [1, 3]}, kind="column_wise"))
    _, ready = planner(entry)
    constraints = {"s": ParameterConstraints(min_partition=8)}
    again = build_planner(ready, world_size=4, profile=profile(), constraints=constraints)
    ranks = where(again.plan_in_detail(ready.model, ready.sharders()))
    assert sorted(ranks["s"]) == [1, 3]


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


AT = r"registry\.yaml:10 sharding\[0\]"


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        (
            [(["*"], part({"a": [4]}))],
            RecdError,
            AT + r": acme.placed wants table a on rank 4, and there are 4, from 0",
        ),
        (
            [(["*"], part({"a": [0], "b": [1]}, ["a", "b"]))],
            RecdError,
            AT + r": no rank is left .* b on rank 1, says acme.placed .*; a, b together on one of",
        ),
        (
            [(["a"], part({"a": [1]}, kind="row_wise"))],
            SetupError,
            r"table a is to be sharded row_wise, .* a on rank 1, says acme.placed \(" + AT,
        ),
        (
            [(["*"], part(None, ["a", "b"], kind="column_wise"))],
            SetupError,
            r"table [ab] is to be sharded column_wise, .* a, b together on one of ranks 0, 1",
        ),
        (
            [(["a"], part({"a": [1]}, kind="table_row_wise"))],
            SetupError,
            r"table a is to be sharded table_row_wise, .* let its sharding be one of table_wise, ",
        ),
    ],
)
def test_a_contradiction_names_who_says_it(entries: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        planner(*entries)


def test_what_does_not_fit_on_its_rank_names_who_says_it() -> None:
    # Each rank has a quarter of the memory, less than the three tables take.
    memory = sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES") // 4
    rows = int(0.4 * memory) // 64
    assert len(where(planned((["*"], part(kind="table_wise")), rows=rows))) == 3
    with pytest.raises(
        NoPlanError,
        match=r"no plan fits .*; entries place tables: a, b, s together on one of ranks 0, "
        r"1, 2, 3, says acme\.placed \(" + AT,
    ):
        planned((["*"], part(None, ["a", "b", "s"], kind="table_wise")), rows=rows)


def test_the_tables_of_the_model_are_what_a_part_is_asked_of() -> None:
    found, ready = planner((["a"], part({"b": [3]})))
    assert found.constraints(ready.model, ready.sharders()).keys() == {
        table.name for table in tables_of(ready.model)
    }
    assert found.plan_in_detail(ready.model, ready.sharders()).groups == ()


class Claims(TableStrategy):
    """Has slots for rows of one table, and copies on every rank."""

    def __init__(self, table: str, slots: int, copies: int) -> None:
        self._table, self._slots, self._copies = table, slots, copies

    def row_memory(self, option: Any, shard: Any, *_: Any) -> RowMemory | None:
        return RowMemory(self._slots, 4 * self._slots, 0) if option.name == self._table else None

    def memory_of_rank(self, *_: Any) -> Mapping[str, int]:
        return {"copies of rows": self._copies} if self._copies else {}


def test_who_takes_the_memory_is_named_with_what() -> None:
    entries = (["a"], Claims("a", 2**40, 0)), (["b"], Claims("b", 2**30, 2**39))
    with pytest.raises(NoPlanError) as caught:
        planned(*entries, ranks=2)
    said = str(caught.value)
    assert (
        "; besides 512.0 GiB of copies of rows a rank, 5120.0 GiB for rows of a by acme.placed "
        "(registry.yaml:10 sharding[0]), 5.0 GiB for rows of b by acme.kept (registry.yaml:11"
    ) in said, said

"""The contract of table parts, of shardings and caches alike."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
from torchrec.distributed.planner.types import ParameterConstraints

from recd_plugins.interfaces import Cache, Setting, Sharding, Table, TablePart
from recd_plugins.planning.topologies import this_machine
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.contracts.skewed_data import SkewedData


class TablePartContract(PluginContract):
    """Tests of what a plugin does to tables; override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Tables that the plugin takes; the last is another's."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
            Table("t_other", ("other",), 200, 16, pooled=True),
        )

    @pytest.fixture
    def setting(self) -> Setting:
        """One rank, whose data is ``SkewedData``."""
        topology = this_machine(1)
        return Setting(
            world_size=1,
            ranks_per_node=1,
            batch_size=64,
            optimizer="sgd",
            device_type=topology.device,
            rates=topology.collective_rates,
            data=SkewedData(),
        )

    def test_constrains_only_the_tables_it_is_given(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        own = {table.name for table in tables[:-1]}
        part = plugin.part(tables[:-1], setting)
        of_part = {} if part is None else part.constraints(tables)
        for constraints in (plugin.constraints(tables[:-1]), of_part):
            assert set(constraints) <= own
            assert all(isinstance(value, ParameterConstraints) for value in constraints.values())

    def test_does_nothing_without_tables(self, plugin: Sharding | Cache, setting: Setting) -> None:
        assert dict(plugin.constraints([])) == {}
        assert plugin.part([], setting) is None

    def test_looks_up_only_the_tables_it_is_given(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        part = plugin.part(tables[:-1], setting)
        if part is not None and (kernels := type(part).kernels([part])) is not None:
            assert set(kernels.tables) <= {table.name for table in tables[:-1]}

    def test_says_nothing_of_other_tables(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        part = plugin.part(tables[:-1], setting)
        if part is not None:
            assert said_of(part, tables[-1]) == said_of(TablePart(), tables[-1])

    def test_every_rank_makes_the_same_part(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        # Made anew from its options, as on each rank.
        parts = [copy(plugin).part(tables[:-1], setting) for _ in range(2)]
        first, second = (part and [said_of(part, table) for table in tables[:-1]] for part in parts)
        assert first == second

    def test_its_part_travels(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        part = plugin.part(tables[:-1], setting)
        if part is not None:
            # Readers in other processes have it, where a wrapper of the dataset asks for it.
            again = pickle.loads(pickle.dumps(part))
            assert [said_of(again, t) for t in tables] == [said_of(part, t) for t in tables]


def said_of(part: TablePart, table: Table) -> dict[str, Any]:
    """What a part says of a table."""
    return {
        "ranks": part.ranks(table.name),
        "together": [sorted(group) for group in part.together() if table.name in group],
        "share": part.sharded_share(table.name),
        "bandwidth": part.fetch_bandwidth(table.name),
        "activations": part.activation_bytes(table, 100.0),
        "collectives": part.collectives([table.name]),
        "figures": dict(part.figures(table.name)),
        "words": list(part.words(table.name)),
    }

"""The contract of table parts, of shardings and caches alike."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingType,
    ShardMetadata,
)

from recd_plugins.distributed.launch import launch
from recd_plugins.interfaces import Cache, PlanContext, Sharding, Table, TableStrategy
from recd_plugins.interfaces.tables import StepShape
from recd_plugins.planning.topologies import this_machine
from recd_plugins.sharding.entry_constraints import merged_constraints, set_fields
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.contracts.skewed_data import SkewedData

_COPIED = ShardingType.DATA_PARALLEL.value


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
    def setting(self) -> PlanContext:
        """One rank, whose data is ``SkewedData``."""
        topology = this_machine(1)
        return PlanContext(
            world_size=1,
            ranks_per_node=1,
            batch_size=64,
            optimizer="sgd",
            device_type=topology.device,
            rates=topology.collective_rates,
            data=SkewedData(),
        )

    def test_constrains_only_the_tables_it_is_given(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        own = {table.name for table in tables[:-1]}
        part = plugin.part(tables[:-1], setting)
        of_part = {} if part is None else part.constraints(tables)
        for constraints in (plugin.constraints(tables[:-1]), of_part):
            assert set(constraints) <= own
            assert all(isinstance(value, ParameterConstraints) for value in constraints.values())

    def test_plugin_and_part_agree(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        if (part := plugin.part(tables[:-1], setting)) is not None:
            _merged(plugin, part, tables[:-1])

    def test_does_nothing_without_tables(
        self, plugin: Sharding | Cache, setting: PlanContext
    ) -> None:
        assert dict(plugin.constraints([])) == {}
        assert plugin.part([], setting) is None

    def test_looks_up_only_the_tables_it_is_given(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        part = plugin.part(tables[:-1], setting)
        if part is not None and (kernels := type(part).kernels([part])) is not None:
            assert set(kernels.tables) <= {table.name for table in tables[:-1]}

    def test_says_nothing_of_other_tables(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        part = plugin.part(tables[:-1], setting)
        if part is not None:
            assert said_of(part, tables[-1]) == said_of(TableStrategy(), tables[-1])

    def test_every_rank_makes_the_same_part(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        # Made anew from its options, as on each rank.
        first, second = (_said_by(copy(plugin), tables, setting) for _ in range(2))
        assert first == second

    def test_another_process_makes_the_same_part(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        """Sets have another order there, as on each rank, unless PYTHONHASHSEED is set."""
        (there,) = launch(_said_on_a_rank, 1, plugin, tables, setting)
        assert there == _said_by(plugin, tables, setting)

    def test_its_part_travels(
        self, plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext
    ) -> None:
        part = plugin.part(tables[:-1], setting)
        if part is not None:
            # Readers in other processes have it, where a wrapper of the dataset asks for it.
            again = pickle.loads(pickle.dumps(part))
            expected = _said(plugin, part, tables, setting)
            assert _said(plugin, again, tables, setting) == expected


def _said_on_a_rank(
    _rank: int,
    _world_size: int,
    plugin: Sharding | Cache,
    tables: Sequence[Table],
    setting: PlanContext,
) -> object:
    return _said_by(plugin, tables, setting)


def _said_by(plugin: Sharding | Cache, tables: Sequence[Table], setting: PlanContext) -> object:
    """What a plugin and its part say of its tables; numbers to the last bit."""
    constraints = _figures_of(plugin.constraints(tables[:-1]))
    part = plugin.part(tables[:-1], setting)
    return constraints, None if part is None else _said(plugin, part, tables[:-1], setting)


def _said(
    plugin: Sharding | Cache, part: TableStrategy, tables: Sequence[Table], setting: PlanContext
) -> dict[str, Any]:
    """All that a part says."""
    constraints = _merged(plugin, part, tables)
    free = ParameterConstraints()
    kernels = type(part).kernels([part])
    return {
        "tables": [said_of(part, table) for table in tables],
        "constraints": _figures_of(part.constraints(tables)),
        "kernels": kernels and (kernels.compute_kernel, sorted(kernels.tables)),
        "memory_of_rank": dict(part.memory_of_rank(setting.ranks_per_node, setting.optimizer)),
        "of_a_shard": [
            _said_of_a_shard(part, table, setting, constraints.get(table.name, free))
            for table in tables
        ],
    }


def _merged(
    plugin: Sharding | Cache, part: TableStrategy, tables: Sequence[Table]
) -> dict[str, ParameterConstraints]:
    """What both ask for tables, of which neither contradicts the other."""
    merged = dict(plugin.constraints(tables))
    for name, second in part.constraints(tables).items():
        first = merged.get(name, second)
        both = {*set_fields(first)} & {*set_fields(second)}
        assert all(getattr(first, field) == getattr(second, field) for field in both), name
        merged[name] = merged_constraints(first, second)
    return merged


def _figures_of(constraints: Mapping[str, ParameterConstraints]) -> dict[str, object]:
    """Constraints with the figures of what a cache expects, which are equal to themselves alone."""
    figures: dict[str, object] = {}
    for name, value in constraints.items():
        if (cache := value.cache_params) is None or (stats := cache.stats) is None:
            figures[name] = value
            continue
        without = replace(value, cache_params=replace(cache, stats=None))
        misses = [stats.expected_miss_rate(share) for share in (0.1, 0.5)]
        figures[name] = without, stats.expected_lookups, stats.cacheability, misses
    return figures


def _said_of_a_shard(
    part: TableStrategy, table: Table, setting: PlanContext, constraints: ParameterConstraints
) -> object:
    """What it says of a shard in a plan that obeys the constraints."""
    kinds, compute_kernels = constraints.sharding_types, constraints.compute_kernels
    kind = kinds[0] if kinds else ShardingType.TABLE_WISE.value
    kernels = type(part).kernels([part])
    if kernels is not None and table.name in kernels.tables:
        kernel = kernels.compute_kernel
    else:
        kernel = compute_kernels[0] if compute_kernels else EmbeddingComputeKernel.FUSED.value
    is_split, is_copied = kind == ShardingType.ROW_WISE.value, kind == _COPIED
    ranks = sorted(part.ranks(table.name) or range(setting.world_size))
    if not (is_split or is_copied):
        ranks = ranks[:1]
    rows = -(-table.num_embeddings // len(ranks)) if is_split else table.num_embeddings
    shards = [
        Shard([min(rows, table.num_embeddings - start), table.embedding_dim], [start, 0])
        for start in range(0, table.num_embeddings, rows)
    ]
    option = ShardingOption(
        table.name,
        torch.empty([table.num_embeddings, table.embedding_dim], device="meta"),
        ("tables", torch.nn.Module()),
        input_lengths=[1.0] * len(table.features),
        batch_size=setting.batch_size,
        sharding_type=kind,
        partition_by="device",
        compute_kernel=kernel,
        shards=shards,
        cache_params=constraints.cache_params,
    )
    spec = EnumerableShardingSpec(
        [
            ShardMetadata(shard.offset, shard.size, f"rank:{rank}/{setting.device_type}")
            for shard, rank in zip(shards, ranks, strict=False)
        ]
    )
    sharding = ParameterSharding(kind, kernel, ranks, None if is_copied else spec)
    step = StepShape(
        setting.batch_size, setting.world_size, setting.ranks_per_node, setting.data.profile()
    )
    return (
        part.row_memory(option, shards[0], setting.optimizer, setting.device_type),
        list(part.work(table, sharding, step)),
    )


def said_of(part: TableStrategy, table: Table) -> dict[str, Any]:
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
        "needs_stock_kernels": part.needs_stock_kernels().get(table.name),
    }

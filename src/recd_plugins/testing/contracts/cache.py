"""The contract of caches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import copy

import numpy as np
import pytest
import torch
from torchrec.distributed.planner.types import ParameterConstraints

from recd_plugins.distributed.cached.spec import TableCache
from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Cache, Setting, Table
from recd_plugins.planning.topologies import this_machine
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.contracts.sharding import SkewedData


class CacheContract(PluginContract):
    """Tests of a cache plugin: override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Tables that the plugin takes; the last has no cache."""
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

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_check_returns_or_raises_setup_error(self, plugin: Cache, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        with contextlib.suppress(SetupError):
            plugin.check(torch.device(device))

    def test_caches_only_the_tables_it_is_given(
        self, plugin: Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        caches = plugin.caches(tables[:-1], setting)
        assert set(caches) <= {table.name for table in tables[:-1]}
        assert all(isinstance(cache, TableCache) for cache in caches.values())

    def test_caches_the_same_on_every_rank(
        self, plugin: Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        first, again = (copy(plugin).caches(tables[:-1], setting) for _ in range(2))
        assert list(first) == list(again)
        for name, cache in first.items():
            assert cache.load_factor == again[name].load_factor
            np.testing.assert_array_equal(cache.hot_rows, again[name].hot_rows)

    def test_constrains_only_the_tables_it_is_given(
        self, plugin: Cache, tables: Sequence[Table], setting: Setting
    ) -> None:
        caches = plugin.caches(tables[:-1], setting)
        constraints = plugin.constraints(tables[:-1])
        assert set(constraints) <= {table.name for table in tables[:-1]}
        assert not set(constraints) & set(caches), "the planner constrains those itself"
        assert all(isinstance(value, ParameterConstraints) for value in constraints.values())

    def test_does_nothing_without_tables(self, plugin: Cache, setting: Setting) -> None:
        assert dict(plugin.caches([], setting)) == {}
        assert dict(plugin.constraints([])) == {}
